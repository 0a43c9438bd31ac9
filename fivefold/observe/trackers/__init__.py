"""Trackers of experiments: one file for each, over the package of its makers."""
