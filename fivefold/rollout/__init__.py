"""Generation: the protocol of rollout engines, and the engines."""
