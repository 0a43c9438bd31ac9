"""SkyRL's configurations."""
