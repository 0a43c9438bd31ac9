"""Weights between Hugging Face files and Megatron-Core parameters."""
