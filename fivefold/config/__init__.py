"""The recipe: its schema, how it is read, and what is wrong with it. No torch."""
