"""Recipes from other frameworks' configurations, converted key by key: one folder for each framework."""
