"""ROLL's configurations."""
