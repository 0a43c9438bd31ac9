"""The contract of a training engine, and what every engine shares: packing, sequences, heads, log-probs and kernels."""
