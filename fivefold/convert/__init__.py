"""Other model formats to Hugging Face folders, and these to Megatron-Core checkpoints."""
