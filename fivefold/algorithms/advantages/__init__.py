"""Advantages of sampled completions from their rewards: one file a method, each with the equation of its paper."""
