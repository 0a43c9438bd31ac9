"""Agents: a user's program that asks the model through an OpenAI-compatible URL."""
