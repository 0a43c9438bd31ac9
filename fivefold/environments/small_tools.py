"""The tools of recipes/calculator.yaml and recipes/search.yaml. Their docstrings are what the model reads."""

from __future__ import annotations

import re
from functools import cache

from fivefold.data.made_up_facts import the_world


def calculate(expression: str) -> str:
    """Add or subtract two numbers.

    Args:
        expression: two numbers and the sign between them
    """
    found = re.fullmatch(r"(-?\d{1,9})([+-]\d{1,9})", expression.replace(" ", ""))
    return str(int(found[1]) + int(found[2])) if found else "write two numbers"


def search(query: str) -> str:
    """Look up the fact about a name.

    Args:
        query: the name
    """
    facts = _facts()
    return next((facts[word] for word in query.split() if word in facts), "nothing is known")


@cache
def _facts() -> dict[str, str]:
    """Return the facts of the recipe's world by the name with which each begins."""
    return {fact.split()[0]: fact for fact in the_world().facts}
