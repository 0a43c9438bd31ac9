"""Turns a YAML file and `a.b=c` overrides into one plain dict: duplicate keys are refused, `${...}` is filled in."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel

from fivefold.config.problems import RecipeError, section_of

KEY = re.compile(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*")
COMMENT = re.compile(r"(^|\s)#")
MISSING = "???"
QUOTES = frozenset("'\"")


def read_mapping(path: Path) -> DictConfig:
    """Return the file's keys and values; interpolations are not filled in yet.

    Raises:
        RecipeError: a file that does not exist, is empty, is not YAML, is not a mapping, or gives a key twice.
    """
    if not path.is_file():
        what = "is a folder, not a file" if path.is_dir() else "does not exist"
        raise RecipeError(str(path), [f"the recipe {what}"])
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None:
            raise RecipeError(
                str(path), ["the file is empty; a recipe needs at least experiment_name, actor and train_dataset"]
            )
        if not isinstance(root, yaml.MappingNode):
            raise RecipeError(
                str(path),
                [f"a recipe is a mapping of keys to values, not a {type(root).__name__.removesuffix('Node').lower()}"],
            )
        if duplicates := list(_duplicates(root)):
            raise RecipeError(str(path), duplicates)
        config = OmegaConf.create(text)
    except yaml.YAMLError as error:
        raise RecipeError(str(path), [f"not YAML: {_one_line(error)}"]) from error
    except UnicodeDecodeError as error:
        raise RecipeError(str(path), [f"not a text in UTF-8: {error.reason} at byte {error.start}"]) from error
    except OmegaConfBaseException as error:
        raise RecipeError(str(path), [_omegaconf_line(error)]) from error
    assert isinstance(config, DictConfig), "the root is a mapping"
    return config


def _duplicates(node: yaml.Node, prefix: str = "") -> Iterator[str]:
    """Yield a line for each key that its mapping holds twice, at any depth."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _duplicates(item, prefix)
    if not isinstance(node, yaml.MappingNode):
        return
    first: dict[str, int] = {}
    for key, value in node.value:
        path, line = f"{prefix}{key.value}", key.start_mark.line + 1
        if path in first and key.tag != "tag:yaml.org,2002:merge":
            yield f"{path}: given twice, in lines {first[path]} and {line}; keep one"
        first.setdefault(path, line)
        yield from _duplicates(value, f"{path}.")


def apply_overrides(config: DictConfig, overrides: Sequence[str]) -> tuple[DictConfig, list[str]]:
    """Return `config` with each `a.b=c` applied in turn, and a line for each override that cannot be read.

    Values have the types that YAML gives them: 8, 1e-5, true, null, [a, b], {a: 1}, text.
    """
    problems = []
    for override in overrides:
        problem = _override_problem(override)
        if problem is None:
            try:
                config = _mergeable(config, OmegaConf.from_dotlist([override]))
                config.merge_with_dotlist([override])
            except yaml.YAMLError as error:
                problem = f"the value is not YAML ({_one_line(error)}); quote it"
            except OmegaConfBaseException as error:
                problem = _omegaconf_line(error)
        if problem is not None:
            problems.append(f"override {override!r}: {problem}")
    return config, problems


def _override_problem(override: str) -> str | None:
    key, equals, value = override.partition("=")
    if not equals:
        return "there is no `=`; write key=value"
    bare = key.lstrip("+-~")
    if bare != key and KEY.fullmatch(bare):
        return f"no prefix is needed; write {bare}=..."
    if not KEY.fullmatch(key):
        return f"`{key}` is not a key; write section.key=value"
    if COMMENT.search(value) and not QUOTES & set(value):
        return "` #` starts a comment in YAML and would cut the value short; quote it"
    return None


def resolve(config: DictConfig, schema: type[BaseModel]) -> tuple[dict[str, Any], list[str]]:
    """Return the keys that the recipe sets as a plain dict, `${...}` filled in, and a line for each missing value.

    An interpolation may name a key that keeps its default. If there are any lines, the dict is empty.
    """
    written = OmegaConf.to_container(config, resolve=False)
    full = OmegaConf.merge(_mergeable(OmegaConf.create(_defaults(schema)), config), config)
    assert isinstance(full, DictConfig), "both parts are mappings"
    problems = [f"{key}: `{MISSING}` stands for a value that is still missing: give one" for key in _missing(written)]
    problems += _dangling(full)
    if problems:
        return {}, problems
    picked = _pick(OmegaConf.to_container(full, resolve=True), written)
    assert isinstance(picked, dict), "the root is a mapping"
    return picked, []


def _mergeable(under: DictConfig, over: DictConfig) -> DictConfig:
    """Return `under` without its lists where `over` has mappings, and the reverse, because OmegaConf merges neither.

    Only the value in `over` is left, and the schema says whether it is of the right type.
    """

    def kept(low: dict[Any, Any], high: dict[Any, Any]) -> dict[Any, Any]:
        return {
            key: kept(value, high[key]) if isinstance(value, dict) and isinstance(high.get(key), dict) else value
            for key, value in low.items()
            if {type(value), type(high.get(key))} != {dict, list}
        }

    low, high = (OmegaConf.to_container(config, resolve=False) for config in (under, over))
    assert isinstance(low, dict), "both are mappings"
    assert isinstance(high, dict), "both are mappings"
    return OmegaConf.create(kept(low, high))


def _missing(value: Any, path: str = "") -> Iterator[str]:
    if value == MISSING:
        yield path
    for key, inner in _entries(value):
        yield from _missing(inner, f"{path}.{key}" if path else str(key))


def _entries(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list):
        yield from enumerate(value)


def _dangling(node: DictConfig | ListConfig) -> Iterator[str]:
    """Yield a line for each interpolation that cannot be filled in."""
    keys: Iterable[Any] = node if isinstance(node, DictConfig) else range(len(node))
    for key in keys:
        if OmegaConf.is_missing(node, key):
            continue
        try:
            value = node[key]
        except OmegaConfBaseException as error:
            yield _omegaconf_line(error)
            continue
        if isinstance(value, (DictConfig, ListConfig)) and not OmegaConf.is_interpolation(node, key):
            yield from _dangling(value)


def _defaults(schema: type[BaseModel]) -> dict[str, Any]:
    """Return every default of the schema, also those inside required sections."""
    defaults: dict[str, Any] = {}
    for name, field in schema.model_fields.items():
        section = section_of(field.annotation)
        if field.is_required():
            if section is not None:
                defaults[name] = _defaults(section)
        else:
            default = field.default
            defaults[name] = default.model_dump() if isinstance(default, BaseModel) else default
    return defaults


def _pick(resolved: Any, written: Any) -> Any:
    """Return the part of `resolved` whose keys are in `written`."""
    if isinstance(resolved, dict) and isinstance(written, dict):
        return {key: _pick(resolved[key], value) for key, value in written.items()}
    return resolved


def _one_line(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem} in line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"
    return " ".join(str(error).split())


def _omegaconf_line(error: OmegaConfBaseException) -> str:
    message = str(error).splitlines()[0]
    return f"{error.full_key}: {message}" if error.full_key else message
