"""Environments of other projects: each needs its package, which is imported when a recipe names it."""
