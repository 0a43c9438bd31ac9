"""Fills in interpolations such as `${actor.path}` and `${oc.env:NAME}` with OmegaConf, within limits.

OmegaConf computes an interpolation again wherever it is used, so that a few lines could take for ever:

    a: ${b}${b}
    b: ${c}${c}
    ...
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

_SECRET = re.compile(r"(^|_)(API)?(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.IGNORECASE)


def names_secret(variable: str) -> bool:
    """Return whether the name of an environment variable says that its value is a secret, such as `WANDB_API_KEY`."""
    return _SECRET.search(variable) is not None


MOST_CHARACTERS = 1000
"""Most characters of a text with an interpolation."""
MOST_INTERPOLATIONS = 500
"""Most interpolations in a recipe."""
MOST_STEPS = 20
"""Most interpolations that lead from one to the next."""
MOST_LOOKUPS = 2000
"""Most values that are looked up, each as often as it is used."""

REFERENCE = re.compile(r"\$\{\s*(?:oc\.select:\s*)?(\.*)([\w.\[\]-]*)")
VARIABLE = re.compile(r"\$\{\s*oc\.env:\s*(\w+)")
NESTED = re.compile(r"\$\{[^{}]*\$\{(?!\s*oc\.env:)")


def fill_in(values: dict[str, Any]) -> tuple[Any, list[str]]:
    """Return `values` with every interpolation filled in, and a line for each that cannot be.

    If there are any lines, the values are to be ignored.
    """
    texts = dict(_texts(values))
    if not texts:
        return values, []
    if problems := [*_limits(texts), *_secrets(texts)]:
        return {}, problems
    try:
        config = OmegaConf.create(values)
        if problems := list(_dangling(config)):
            return {}, problems
        filled = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        return {}, [_line(error)]
    return filled, []


def _texts(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted path of each text with an interpolation, and the text."""
    if isinstance(value, str) and "${" in value:
        yield path, value
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from _texts(inner, f"{path}.{key}" if path else str(key))


def _limits(texts: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each limit that the texts exceed."""
    for path, text in texts.items():
        if len(text) > MOST_CHARACTERS:
            yield f"{path}: {len(text):,} characters with a `${{...}}`; write at most {MOST_CHARACTERS:,}"
        elif NESTED.search(text):
            yield f"{path}={text}: only `${{oc.env:...}}` can stand inside another `${{...}}`"
    if (count := sum(text.count("${") for text in texts.values())) > MOST_INTERPOLATIONS:
        yield f"there are {count:,} interpolations `${{...}}`; write at most {MOST_INTERPOLATIONS}"
        return
    reached = {path: list(_reached(path, texts)) for path in texts}
    # The values that each text looks up in 0, 1, 2, ... steps.
    before: dict[str, int] = {}
    lookups = dict.fromkeys(texts, 0)
    for _ in range(MOST_STEPS + 1):
        before, lookups = lookups, {path: sum(1 + lookups[text] for text in reached[path]) for path in texts}
    if growing := [path for path in texts if lookups[path] != before[path]]:
        way = f"lead in a circle, or on in more than {MOST_STEPS} steps"
        yield f"{', '.join(growing[:3])}: the interpolations {way}: write values there"
    elif sum(lookups.values()) > MOST_LOOKUPS:
        path = max(lookups, key=lookups.__getitem__)
        yield f"{path}: the interpolations look up more than {MOST_LOOKUPS:,} values: write a value there"


def _secrets(texts: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each text that would bring a secret into the recipe."""
    for path, text in texts.items():
        for name in filter(names_secret, VARIABLE.findall(text)):
            yield (
                f"{path}={text}: the value of {name} would be written to recipe.yaml, checkpoints and trackers. Let "
                "the code that needs it read the environment variable (reward.kwargs.api_key_env names one), or rename "
                "a variable that holds no secret"
            )


def _reached(path: str, texts: Mapping[str, str]) -> Iterator[str]:
    """Yield the texts that the text at `path` reads, once for each of its interpolations."""
    for dots, name in REFERENCE.findall(texts[path]):
        above = path.split(".")[: -len(dots)] if dots else []
        key = ".".join([*above, *re.findall(r"[\w-]+", name)])
        for text in texts:
            if text == key or text.startswith(f"{key}.") or key.startswith(f"{text}."):
                yield text


def _dangling(node: DictConfig | ListConfig) -> Iterator[str]:
    """Yield a line for each interpolation that cannot be filled in."""
    keys: Iterable[Any] = node if isinstance(node, DictConfig) else range(len(node))
    for key in keys:
        if OmegaConf.is_missing(node, key):
            continue
        try:
            value = node[key]
        except OmegaConfBaseException as error:
            yield _line(error)
            continue
        if isinstance(value, (DictConfig, ListConfig)) and not OmegaConf.is_interpolation(node, key):
            yield from _dangling(value)


def _line(error: OmegaConfBaseException) -> str:
    message = str(error).splitlines()[0]
    return f"{error.full_key}: {message}" if error.full_key else message
