"""siiRL."""
