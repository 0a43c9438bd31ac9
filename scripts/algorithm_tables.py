"""Writes the tables of docs/algorithms.md from the rows of the package: `python scripts/algorithm_tables.py`.

Each table stands between two comments, `<!-- table NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fivefold.config.algorithms import ALGORITHMS, CORRECTIONS, Algorithm, Correction
from fivefold.config.methods import ADVANTAGES, LOSSES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "algorithms.md"
NEEDS = {
    "critic": "it needs a [critic](critic.md)",
    "teacher": "it needs a [teacher](distillation.md)",
    "expert_dataset": "it needs [an expert's data](#given-responses)",
    "environment": "it needs [an environment](agents.md#credit)",
}
"""What the page says about each section that an algorithm needs."""


def page(text: str) -> str:
    """Return the page's text with its tables written again."""
    return re.sub(
        r"(<!-- table (\w+) -->\n).*?(<!-- end -->)",
        lambda match: match[1] + "\n".join(TABLES[match[2]]()) + "\n" + match[3],
        text,
        flags=re.DOTALL,
    )


def _table(head: str, rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield head
    yield "|" + "---|" * (head.count("|") - 1)
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def _algorithms() -> Iterator[str]:
    rows = (
        (f"`{name}`" + " (default)" * (name == "grpo"), row.idea, _sets(row), row.paper)
        for name, row in ALGORITHMS.items()
    )
    return _table("| `algorithm` | | what it sets | paper |", rows)


def _sets(row: Algorithm) -> str:
    """Return the keys of an algorithm, without the word `actor`, and its notes."""
    keys = ", ".join(_assignments({key.removeprefix("actor."): value for key, value in row.keys.items()}))
    return "; ".join(filter(None, (keys, row.note, NEEDS[row.needs] if row.needs else "")))


def _assignments(keys: Mapping[str, Any]) -> Iterator[str]:
    for key, value in keys.items():
        yield f"`{key}`" if value is True else f"`{key}={value:g}`" if isinstance(value, float) else f"`{key}={value}`"


def _losses() -> Iterator[str]:
    rows = ((f"`{name}`", row.formula, row.options, row.elsewhere) for name, row in LOSSES.items())
    return _table("| `actor.loss` | cost of a token | options | elsewhere |", rows)


def _advantages() -> Iterator[str]:
    rows = ((f"`{name}`", row.formula, row.elsewhere) for name, row in ADVANTAGES.items())
    return _table("| `actor.advantage` | A of a completion | elsewhere |", rows)


def _corrections() -> Iterator[str]:
    rows = (
        (f"`{name}`" + " (default)" * (name == "auto"), _corrects(row), row.elsewhere)
        for name, row in CORRECTIONS.items()
    )
    return _table("| `method` | what it sets | elsewhere |", rows)


def _corrects(row: Correction) -> str:
    return ": ".join(filter(None, (", ".join(_assignments(row.keys)), row.idea)))


TABLES: Mapping[str, Callable[[], Iterator[str]]] = {
    "algorithms": _algorithms,
    "losses": _losses,
    "advantages": _advantages,
    "corrections": _corrections,
}

if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
