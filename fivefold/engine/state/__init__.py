"""The training state of an engine: what is stored, copied and loaded."""
