"""Sources of the samples that a step trains on."""
