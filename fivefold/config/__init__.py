"""The recipe: its schema, how it is read, and the errors of what is wrong with it. This room does not import torch."""
