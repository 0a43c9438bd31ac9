"""The training engine on Megatron-Core: the only package that imports megatron."""
