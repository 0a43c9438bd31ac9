"""Allocation strings, degrees of parallelism, the grid of ranks, and where roles run. No torch."""
