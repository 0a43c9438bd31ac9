"""Experiment trackers: one file per package."""
