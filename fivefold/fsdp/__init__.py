"""The training engine on PyTorch FSDP2, over models of transformers."""
