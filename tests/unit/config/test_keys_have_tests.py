"""Every key of a recipe is set by a test that looks at what it does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from fivefold.config.keys import section_of
from fivefold.config.problems import COMMANDS

TESTS = Path(__file__).resolve().parents[2]
IMPORTED = TESTS / "unit" / "fivefold_import"
"""These tests show that another framework's key becomes one of a recipe, and not what that key does."""
SET = re.compile(r"\b(\w+)['\"]?\s*(?:=(?!=)|:)")
"""A name that gets a value: `name=1`, `"name": 1` or, in YAML, `name: 1`."""


def test_a_test_sets_every_key() -> None:
    """A key that no test sets could stop working unseen: write a test that fails if the key changes nothing."""
    files = (file for file in TESTS.rglob("*.py") if not file.is_relative_to(IMPORTED) and file != Path(__file__))
    named = {name for file in files for name in SET.findall(file.read_text(encoding="utf-8"))}
    keys = (key for schema in COMMANDS for key in values_of(schema))
    assert [key for key in keys if key.rpartition(".")[2] not in named] == []


def values_of(schema: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a schema that are not sections."""
    for name, field in schema.model_fields.items():
        if (section := section_of(field.annotation)) is None:
            yield prefix + name
        else:
            yield from values_of(section, f"{prefix}{name}.")
