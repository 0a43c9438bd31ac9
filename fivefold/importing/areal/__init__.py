"""AReaL's configurations."""
