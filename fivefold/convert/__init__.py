"""Other model formats to Hugging Face folders."""
