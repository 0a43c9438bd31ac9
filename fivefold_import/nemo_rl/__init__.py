"""NeMo-RL's configurations."""
