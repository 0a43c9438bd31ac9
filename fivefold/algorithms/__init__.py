"""Advantages, losses, corrections and KL estimators: pure torch functions."""
