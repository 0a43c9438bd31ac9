"""Environments: what turns a task and a model's completions into an episode."""
