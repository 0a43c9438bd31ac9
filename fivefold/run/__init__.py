"""A run's life: folder, setup, checkpoints when they are due, resume, speed."""
