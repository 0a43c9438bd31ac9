"""The training engine on Megatron-Core: the only room that imports megatron."""
