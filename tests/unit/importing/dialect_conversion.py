"""Fixtures converted, their entries by key; and their keys, read by PyYAML and by bash in place of Fivefold."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fivefold.importing.draft import Entry
from fivefold.importing.framework import Framework
from fivefold.importing.recipe import convert
from fivefold.importing.report import Report

FIXTURES = Path(__file__).parent / "fixtures"
ENVIRONMENT = {"HOME": "/home/someone"}
KEY = re.compile(r"\+{0,2}(--[\w-]+|[A-Za-z_][\w.]*)=")
PRINTS_ITS_ARGUMENTS = """
python3() { printf '%s\\n' "$@"; }
ray() { while [ "$1" != python3 ]; do shift; done; "$@"; }
date() { :; }
echo() { :; }
"""


@dataclass(frozen=True)
class Conversion:
    recipe: dict[str, Any]
    """By dotted key."""
    report: Report

    def __getitem__(self, key: str) -> Entry:
        """The only entry of the source's `key`."""
        (entry,) = [entry for entry in self.report.entries if entry.key == key]
        return entry

    def unsupported(self) -> set[str]:
        return {entry.key for entry in self.report.of("unsupported")}


def convert_fixture(
    framework: Framework, *names: str, overrides: Sequence[str] = (), environment: Mapping[str, str] = ENVIRONMENT
) -> Conversion:
    recipe, report = convert(framework, [FIXTURES / name for name in names], overrides, environment)
    return Conversion(dict(leaves(recipe)), report)


def convert_text(framework: Framework, folder: Path, text: str, *overrides: str) -> Conversion:
    """Of a YAML text, or of a script if it has a line that starts `python3`."""
    path = folder / ("launch.sh" if "python3" in text else "config.yaml")
    path.write_text(text, encoding="utf-8")
    recipe, report = convert(framework, [path], overrides, ENVIRONMENT)
    return Conversion(dict(leaves(recipe)), report)


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict) and tree:
        for key, child in tree.items():
            yield from leaves(child, f"{prefix}{key}.")
    elif isinstance(tree, list) and tree and all(isinstance(child, dict) for child in tree):
        for place, child in enumerate(tree):
            yield from leaves(child, f"{prefix}{place}.")
    else:
        yield prefix[:-1], tree


def bash_arguments(script: str, environment: Mapping[str, str] = ENVIRONMENT) -> list[str]:
    """What the script hands to python3, from bash itself."""
    done = subprocess.run(
        ["bash"],
        input=PRINTS_ITS_ARGUMENTS + script,
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def keys_of(fixture: str) -> set[str]:
    """The fixture's keys."""
    text = (FIXTURES / fixture).read_text(encoding="utf-8")
    if fixture.endswith(".yaml"):
        return {key for key, _ in leaves(yaml.safe_load(text))}
    if "TRAINING_CMD" in text:
        text += '\neval "${TRAINING_CMD[@]}"\n'
    return {match[1] for word in bash_arguments(text) if (match := KEY.match(word))}
