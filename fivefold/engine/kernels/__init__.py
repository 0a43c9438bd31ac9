"""Kernels that engines share, each with a plain PyTorch form."""
