"""Advantages of sampled completions from their rewards, each with the equation of its paper."""
