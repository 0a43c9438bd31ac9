"""Advantages, losses and KL estimators: pure torch functions."""
