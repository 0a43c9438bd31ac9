"""The recipe: its schema, how it is read, and the errors of what is wrong with it. No module here imports torch."""
