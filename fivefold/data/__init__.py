"""Prompt data sets, chat templates, and the order in which rows are read."""
