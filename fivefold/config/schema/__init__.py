"""The recipe: every key with its type, its rule, its default and its documentation, each declared once.

A key that is not declared here is an error. Rules that need other keys stand beside the key (`rules.py`); those that
need the model's shape or the layout are in `fivefold.rules`. `docs/recipe.md` is generated from these files.
"""
