"""Simulates asynchronous training, to choose how many GPUs should train and how many generate."""
