"""miles' configurations."""
