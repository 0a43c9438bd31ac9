"""Conversions of fixtures and texts, and the keys of fixtures as PyYAML and bash read them, without Fivefold."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import yaml

from fivefold_import.draft import Entry
from fivefold_import.framework import Framework
from fivefold_import.recipe import convert
from fivefold_import.report import Report

FIXTURES = Path(__file__).parent / "fixtures"
SOURCES: list[tuple[Framework, str]] = [
    (framework, path.name)
    for framework in get_args(Framework)
    for path in sorted(FIXTURES.glob(f"{framework}_*"))
    if ".golden." not in path.name
]
"""Each fixture with the framework that it is written for."""
ENVIRONMENT = {"HOME": "/home/someone"}
KEY = re.compile(r"\+{0,2}(--[\w-]+|[A-Za-z_][\w.]*)=")
PRINTS_ITS_ARGUMENTS = """
python3() { printf '%s\\n' "$@"; }
torchrun() { python3 "$@"; }
ray() { while [ "$1" != python3 ]; do shift; done; "$@"; }
date() { :; }
echo() { :; }
"""
"""Makes bash print the arguments of a script's training command in the place of running it."""


@dataclass(frozen=True)
class Conversion:
    """A converted recipe, flat, with its report."""

    recipe: dict[str, Any]
    """The recipe's values by dotted key."""
    report: Report

    def __getitem__(self, key: str) -> Entry:
        """Return the only entry of the source's `key`."""
        (entry,) = [entry for entry in self.report.entries if entry.key == key]
        return entry

    def unsupported(self) -> set[str]:
        """Return the source's own keys that are unsupported."""
        return {entry.key for entry in self.report.of("unsupported")}


def convert_files(
    framework: Framework, files: Sequence[Path], overrides: Sequence[str], environment: Mapping[str, str]
) -> Conversion:
    recipe, report = convert(framework, files, overrides, environment)
    return Conversion(dict(leaves(recipe)), report)


def convert_fixture(
    framework: Framework, name: str, overrides: Sequence[str] = (), environment: Mapping[str, str] = ENVIRONMENT
) -> Conversion:
    return convert_files(framework, [FIXTURES / name], overrides, environment)


def convert_text(framework: Framework, folder: Path, text: str, *overrides: str) -> Conversion:
    """Convert a YAML text, or a script if the text has a command that starts with `python3`."""
    path = folder / ("launch.sh" if "python3" in text else "config.yaml")
    path.write_text(text, encoding="utf-8")
    return convert_files(framework, [path], overrides, ENVIRONMENT)


def convert_words(framework: Framework, *overrides: str) -> Conversion:
    """Convert overrides alone, without a file."""
    return convert_files(framework, [], overrides, {})


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
    """Return what bash hands to python3 when it runs the script."""
    done = subprocess.run(
        ["bash"],
        input=PRINTS_ITS_ARGUMENTS + script,
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def _with_defaults(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a tree over the trees of the fixtures that it names in `defaults`, as NeMo-RL reads it."""
    named = tree.pop("defaults", [])
    whole: dict[str, Any] = {}
    for name in [named] if isinstance(named, str) else named:
        whole |= _with_defaults(yaml.safe_load((FIXTURES / name).read_text(encoding="utf-8")))
    return _over(whole, tree)


def _over(under: dict[str, Any], tree: dict[str, Any]) -> dict[str, Any]:
    replaces = tree.pop("_override_", False)
    whole = {} if replaces else dict(under)
    for key, value in tree.items():
        old = whole.get(key)
        whole[key] = _over(old if isinstance(old, dict) else {}, value) if isinstance(value, dict) else value
    return whole


def keys_of(fixture: str) -> set[str]:
    """Return the fixture's keys."""
    text = (FIXTURES / fixture).read_text(encoding="utf-8")
    if fixture.endswith(".yaml"):
        return {key for key, _ in leaves(_with_defaults(yaml.safe_load(text)))}
    if "TRAINING_CMD" in text:
        text += '\neval "${TRAINING_CMD[@]}"\n'
    if fixture.startswith(("slime_", "miles_")):
        flags = {word.removeprefix("--") for word in bash_arguments(text) if word.startswith("--")}
        return {flag.partition("=")[0].replace("-", "_") for flag in flags} | {"program"}
    keys = {match[1] for word in bash_arguments(text) if (match := KEY.match(word))}
    return keys | ({"program"} if fixture.startswith("skyrl_") else set())
