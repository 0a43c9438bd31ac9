"""The pages that scripts generate from the schema and from the rows of the algorithms."""

from __future__ import annotations

import re
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
        assert {key for key in values if not any(f"| `{name}` |" in PAGE for name in names_of(key))} == set()


def test_the_page_has_every_table_once() -> None:
    headings = re.findall(r"^### (.+)$", PAGE, re.MULTILINE)
    tables = [table.replace(f"`{heading}.", "`") for heading, table in sections()]
    assert len({table for table in tables if table}) == len([table for table in tables if table])
    links = set(re.findall(r"\(#(\w+)\)", PAGE))
    assert links <= {heading.replace(".", "") for heading in headings}


def sections() -> list[tuple[str, str]]:
    """Return the heading of each section and the rows of its table."""
    parts = re.split(r"^### (.+)$", PAGE, flags=re.MULTILINE)[1:]
    rows = ["\n".join(line for line in text.splitlines() if line.startswith("| `")) for text in parts[1::2]]
    return list(zip(parts[::2], rows, strict=True))


def names_of(key: str) -> list[str]:
    """Return the key, and the keys of the sections to which the page refers for its section."""
    alike = re.findall(r"`([\w.]+)` as \[`([\w.]+)`\]", PAGE)
    alike += re.findall(r"^### ([\w.]+)\n(?:\n[^#|].*\n)*?\nIt has the keys of \[`([\w.]+)`\]", PAGE, re.MULTILINE)
    return [key, *(other + key.removeprefix(own) for own, other in alike if key.startswith(f"{own}."))]
