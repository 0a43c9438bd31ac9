"""Golden files: what a conversion of each fixture gives, in a file next to it.

    PYTHONPATH=. .venv/bin/python tests/unit/fivefold_import/golden.py      # writes them all; read the difference

A golden file has the recipe, the keys that the user has to give, the keys that are unsupported (not their reasons, many of
which are the schema's messages), the problems and the notes.
"""

from __future__ import annotations

from pathlib import Path

from dialect_conversion import ENVIRONMENT, FIXTURES, SOURCES

from fivefold.config.yaml_reader import write_yaml
from fivefold_import.framework import Framework
from fivefold_import.recipe import convert


def golden(fixture: str) -> Path:
    """Return the golden file of a fixture."""
    return FIXTURES / f"{fixture.partition('.')[0]}.golden.yaml"


def converted(framework: Framework, fixture: str) -> str:
    """Return what the golden file of a fixture should hold."""
    recipe, report = convert(framework, [FIXTURES / fixture], [], ENVIRONMENT)
    content = {
        "command": report.command,
        "recipe": recipe,
        "to_give": list(report.to_give),
        "unsupported": [entry.key for entry in report.unsupported],
        "problems": list(report.problems),
        "notes": list(report.notes),
    }
    return write_yaml({name: value for name, value in content.items() if value})


def main() -> None:
    """Write all golden files, and remove those of fixtures that are gone."""
    for old in FIXTURES.glob("*.golden.yaml"):
        old.unlink()
    for framework, fixture in SOURCES:
        golden(fixture).write_text(converted(framework, fixture), encoding="utf-8")


if __name__ == "__main__":
    main()
