"""siiRL's configurations."""
