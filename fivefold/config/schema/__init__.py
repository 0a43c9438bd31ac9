"""The recipe: every key with its type, its rule, its default and its documentation, each declared once.

A key that is not declared here is an error. Rules that need other keys are metadata of the key (`rules.py`); rules that
need the model's shape or the layout are in `fivefold.rules`. `docs/recipe.md` is generated from these files.
"""
