"""Allocation strings, degrees of parallelism, the grid of ranks, the devices of roles. No module here imports torch."""
