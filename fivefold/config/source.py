"""Turns a YAML file and `a.b=c` overrides into one plain dict, with `${...}` filled in."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from fivefold.config.algorithms import of_algorithm, of_correction
from fivefold.config.interpolation import fill_in
from fivefold.config.keys import section_of
from fivefold.config.problems import RecipeError, show
from fivefold.config.text_files import TextError, read_text
from fivefold.config.yaml_reader import MOST_LEVELS, read_yaml

KEY = re.compile(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*")
COMMENT = re.compile(r"(^|\s)#")
MISSING = "???"
QUOTES = frozenset("'\"")


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the file's keys and values; interpolations are not filled in yet.

    Raises:
        RecipeError: the file cannot be read, is empty, is not YAML, or is not a mapping, or it gives a key twice.
    """
    try:
        values = read_yaml(read_text(path, str(path)), str(path))
    except TextError as error:
        raise RecipeError(str(path), error.problems) from error
    if values is None:
        needs = "a recipe needs at least experiment_name, actor and train_dataset"
        raise RecipeError(str(path), [f"the file is empty; {needs}"])
    if not isinstance(values, dict):
        what = "a list" if isinstance(values, list) else f"the value {show(values)}"
        raise RecipeError(str(path), [f"a recipe is a mapping of keys to values, not {what}"])
    return values


def apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return `values` with each `a.b=c` set in turn, and a line for each override that cannot be read.

    The new value has the type that YAML gives it (8, 1e-5, true, null, [a, b], {a: 1}, text), and nothing of the old
    one is left: `a.b={c: 1}` replaces a whole section, `a.b.c=1` sets one key of it.
    """
    problems = []
    for override in overrides:
        try:
            keys, value = _read_override(override)
            values = _with(values, keys, value)
        except TextError as error:
            problems += [f"override {show(override)}: {problem}" for problem in error.problems]
    return values, problems


def _read_override(override: str) -> tuple[list[str], Any]:
    """Return the keys that lead to the value, and the value.

    Raises:
        TextError: there is no `=`, or what is on one of its sides cannot be read.
    """
    key, equals, text = override.partition("=")
    if not equals:
        raise TextError("", ["there is no `=`; write key=value"])
    bare = key.lstrip("+-~")
    if bare != key and KEY.fullmatch(bare):
        raise TextError("", [f"no prefix is needed; write {bare}=..."])
    keys = key.split(".")
    if not KEY.fullmatch(key) or len(keys) > MOST_LEVELS:
        raise TextError("", [f"{show(key)} is not a key; write section.key=value"])
    if COMMENT.search(text) and not QUOTES & set(text):
        raise TextError("", ["` #` starts a comment in YAML and would cut the value short; quote it"])
    return keys, read_yaml(text, key)


def _with(values: dict[str, Any], keys: Sequence[str], value: Any) -> dict[str, Any]:
    """Return `values` with `value` where `keys` lead to; what is there and is no mapping is replaced.

    Raises:
        TextError: the way leads through an interpolation, whose other keys would be lost.
    """
    key, *rest = keys
    if rest:
        below = values.get(key, {})
        if isinstance(below, str) and "${" in below:
            raise TextError("", [f"{key} is {below}, whose keys cannot be set one by one; set all of {key}={{...}}"])
        value = _with(below if isinstance(below, dict) else {}, rest, value)
    return {**values, key: value}


def resolve(values: dict[str, Any], schema: type[BaseModel]) -> tuple[dict[str, Any], list[str]]:
    """Return the keys that the recipe sets, `${...}` filled in, and a line for each missing value.

    An interpolation may name a key that keeps its default. What the recipe's `algorithm` sets counts as written. If
    there are any lines, the dict is empty.
    """
    problems = [f"{key}: `{MISSING}` stands for a value that is still missing: give one" for key in _missing(values)]
    written = _without_nulls(values, schema)
    full, unfilled = fill_in(_merged(defaults(schema), written))
    # The name of the algorithm may be an interpolation, and others may name keys that the algorithm sets.
    # The method of correction may be one of these.
    for preset in (of_algorithm, of_correction) if "algorithm" in schema.model_fields else ():
        if (chosen := preset(full)) and not unfilled:
            written = _merged(chosen, written)
            full, unfilled = fill_in(_merged(defaults(schema), written))
    if problems := problems + unfilled:
        return {}, problems
    return _picked(full, written), []


def _without_nulls(values: Mapping[str, Any], schema: type[BaseModel]) -> dict[str, Any]:
    """Return `values` without the sections and mappings that are null, so that these have their defaults."""
    kept = {}
    for key, value in values.items():
        field = schema.model_fields.get(key)
        if value is None and field is not None and isinstance(field.default, BaseModel | dict):
            continue
        section = None if field is None else section_of(field.annotation)
        kept[key] = _without_nulls(value, section) if section is not None and isinstance(value, dict) else value
    return kept


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of both; where both have a value, `over` counts, and mappings are merged."""
    merged = {**under, **over}
    for key in under.keys() & over.keys():
        if isinstance(under[key], dict) and isinstance(over[key], dict):
            merged[key] = _merged(under[key], over[key])
    return merged


def _missing(value: Any, path: str = "") -> Iterator[str]:
    if value == MISSING:
        yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from _missing(inner, f"{path}.{key}" if path else str(key))


def defaults(schema: type[BaseModel]) -> dict[str, Any]:
    """Return every default of the schema, also those inside required sections."""
    found: dict[str, Any] = {}
    for name, field in schema.model_fields.items():
        section = section_of(field.annotation)
        if field.is_required():
            if section is not None:
                found[name] = defaults(section)
        else:
            default = field.default
            found[name] = default.model_dump() if isinstance(default, BaseModel) else default
    return found


def _picked(full: Any, written: Any) -> Any:
    """Return the part of `full` whose keys are in `written`."""
    if isinstance(full, dict) and isinstance(written, dict):
        return {key: _picked(full[key], value) for key, value in written.items()}
    return full
