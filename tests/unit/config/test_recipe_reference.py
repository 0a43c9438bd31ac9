"""The pages that scripts generate from the schema and from the rows of the algorithms."""

from __future__ import annotations

import runpy
from pathlib import Path

from fivefold.config.keys import known_keys
from fivefold.config.problems import COMMANDS

ROOT = Path(__file__).resolve().parents[3]
ALGORITHMS = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs/recipe.md").read_text(encoding="utf-8")


def test_the_page_is_current() -> None:
    module = runpy.run_path(str(ROOT / "scripts/recipe_reference.py"))
    assert module["page"]() == PAGE, "run: python scripts/recipe_reference.py"


def test_the_tables_of_algorithms_are_current() -> None:
    module = runpy.run_path(str(ROOT / "scripts/algorithm_tables.py"))
    assert module["page"](ALGORITHMS) == ALGORITHMS, "run: python scripts/algorithm_tables.py"


def test_the_page_has_every_key() -> None:
    for schema in COMMANDS:
        keys = set(known_keys(schema))
        values = {key for key in keys if not any(other.startswith(f"{key}.") for other in keys)}
        assert {key for key in values if f"`{key}`" not in PAGE} == set()
