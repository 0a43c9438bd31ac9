"""The recipe: every key with its type, its rule, its default and its documentation, each declared once.

A key that is not declared here is an error. Rules that need two keys are in the validators of their
section; rules that need the model's shape or the layout are in `fivefold.families.check`. `docs/recipe.md` is generated
from these files.
"""
