"""The keys of a schema: their dotted paths, the text that describes each, and those that a misspelled key may mean."""

from __future__ import annotations

import ast
import difflib
import inspect
import textwrap
import types
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel

MOST_SUGGESTIONS = 3


@cache
def known_keys(schema: type[BaseModel]) -> tuple[str, ...]:
    """Return the dotted paths of all keys, sections included."""
    return tuple(path for path, _ in _owned_keys(schema))


def _owned_keys(schema: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the dotted path of each key, sections included, and the class of the section that the key is in."""
    for name, field in schema.model_fields.items():
        yield prefix + name, schema
        section = section_of(field.annotation)
        if section is not None:
            yield from _owned_keys(section, f"{prefix}{name}.")


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the section class in a field's type, also in `Section | None`; None for a plain value."""
    options = options_of(annotation)
    return next((option for option in options if isinstance(option, type) and issubclass(option, BaseModel)), None)


def options_of(annotation: Any) -> tuple[Any, ...]:
    """Return the types that a field may have."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def flattened(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value of nested sections under its dotted key; an empty section is a value."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def description_of(section: type[BaseModel], key: str) -> str:
    """Return the text below a key in its section, or in the base of the section that has it; empty: there is none.

    pydantic can read these texts as it makes a class (`use_attribute_docstrings`), which takes half of the time of the
    schema's import, and every process of a run imports it. Only the message for an unknown key needs them.
    """
    owner = next(base for base in section.__mro__ if key in vars(base).get("__annotations__", {}))
    return _texts(owner).get(key, "")


@cache
def _texts(owner: type) -> Mapping[str, str]:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: text.value.value
        for field, text in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


def nearest_keys(key: str, schema: type[BaseModel]) -> list[str]:
    """Return the known keys that `key` most likely stands for.

    Its last word is compared with the names of the keys in its own section, in those inside it and in all others, and
    then with what their descriptions call them: `lr` is described as the peak learning rate.
    """
    section, _, name = key.rpartition(".")
    siblings = {f"{section}.{field}" if section else field: field for field in _fields_at(section, schema)}
    owners = dict(_owned_keys(schema))
    names = {path: path.rpartition(".")[2] for path in owners}
    phrases = {path: _first_sentence(description_of(owner, names[path])) for path, owner in owners.items()}
    phrase = name.replace("_", " ").lower()
    for word, words, cutoff in (
        (name, siblings, 0.75),
        (name, _inside(section, names), 0.8),
        (name, names, 0.8),
        (phrase, _inside(section, phrases), 0.75),
        (phrase, phrases, 0.75),
    ):
        if close := difflib.get_close_matches(word, set(words.values()), n=1, cutoff=cutoff):
            return _likeliest(key, [path for path, each in words.items() if each == close[0]])
    return []


def _first_sentence(description: str) -> str:
    """Return the first sentence of a key's description, in small letters."""
    return inspect.cleandoc(description).partition(".")[0].lower()


def _inside(section: str, words: Mapping[str, str]) -> dict[str, str]:
    """Return the entries whose paths are inside the section."""
    return {path: word for path, word in words.items() if section and path.startswith(f"{section}.")}


def _likeliest(key: str, paths: list[str]) -> list[str]:
    """Return the paths if they are few, and otherwise the one that is most like `key`."""
    likeness = {path: difflib.SequenceMatcher(None, key, path).ratio() for path in paths}
    return paths if len(paths) <= MOST_SUGGESTIONS else [max(paths, key=likeness.__getitem__)]


def _fields_at(section: str, schema: type[BaseModel]) -> Iterable[str]:
    """Return the keys of the section at a dotted path, which may lead through a mapping of names to sections."""
    annotation: Any = schema
    for part in section.split(".") if section else ():
        owner = section_of(annotation)
        if owner is not None:
            field = owner.model_fields.get(part)
            annotation = field.annotation if field is not None else None
        else:
            annotation = get_args(annotation)[1] if get_origin(annotation) is dict else None
    owner = section_of(annotation)
    return owner.model_fields if owner is not None else ()
