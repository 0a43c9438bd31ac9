"""slime's configurations."""
