"""Weight transports from trainer to rollout."""
