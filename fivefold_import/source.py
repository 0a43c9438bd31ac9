"""Reading another framework's configuration, from YAML files, launch scripts and `a.b=c` overrides, as flat keys.

actor:                          actor.lr      1e-06
  lr: 1e-6              ->      actor.path    "Qwen/Qwen3-8B"
  path: ${model}                model         "Qwen/Qwen3-8B"
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import add, mul, truediv
from pathlib import Path
from typing import Any

import yaml

from fivefold.config.text_files import TextError, read_text
from fivefold.config.yaml_reader import LimitedLoader, read_yaml
from fivefold_import.shell.commands import OVERRIDE
from fivefold_import.shell.expand import Text
from fivefold_import.shell.script import read_script

SCRIPTS = (".sh", ".bash", ".txt", "")
YAMLS = (".yaml", ".yml", ".json")
INTERPOLATION = re.compile(r"\$\{([^${}]*)\}")
ARITHMETIC: Mapping[str, Callable[[Any, Any], Any]] = {"add": add, "mul": mul, "div": truediv, "max": max}
"""Resolvers that frameworks register for their files, such as `${mul:${policy.length},2}`."""
DEEPEST = 20
"""The most interpolations that are followed for one value, so that a loop of them ends."""
MOST_KEYS = 10_000
"""The most keys of a source once interpolations of sections are filled in."""


class Loader(LimitedLoader):
    """Reads YAML 1.1, as other frameworks do, with the numbers of YAML 1.2: `1e-6` is one, `0.99_1.01` is not."""


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


@dataclass
class Document:
    """The keys of one file."""

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    caveats: dict[str, str] = field(default_factory=dict)
    """For some keys, what their value depends on that the file does not say."""
    notes: list[str] = field(default_factory=list)
    """Notes on the file as a whole."""
    problems: list[str] = field(default_factory=list)
    """What of the file is not read."""
    written: dict[str, str] = field(default_factory=dict)
    """The names in the file of keys that are read by another name."""
    program: str = ""
    """The program that a script starts: a module or a file; empty for other files."""

    def renamed(self, name: Callable[[str], str]) -> Document:
        """Return the document with the keys that `name` gives for its own; `written` keeps the names that it has."""
        written = {name(key): self.written.get(key, key) for key in self.values if name(key) != key}
        return replace(
            self,
            values={name(key): value for key, value in self.values.items()},
            caveats={name(key): note for key, note in self.caveats.items()},
            written={**self.written, **written},
        )

    def update(self, other: Document) -> None:
        """Take over the keys of `other`, which override this document's; a value replaces a whole section."""
        sections = tuple(f"{key}." for key in other.values)
        self.values = {key: value for key, value in self.values.items() if not key.startswith(sections)} | other.values
        self.caveats = {key: note for key, note in self.caveats.items() if key not in other.values} | other.caveats
        self.written = {key: old for key, old in self.written.items() if key not in other.values} | other.written
        self.notes += other.notes
        self.problems += other.problems
        self.program = other.program or self.program


def read_document(path: Path, environment: Mapping[str, str]) -> Document:
    """Return the keys of a YAML file, or of the command that a script launches.

    Args:
        path: the file; its suffix says what it is.
        environment: variables that a script may read.

    Raises:
        ValueError: there is no such file, or it cannot be read as what its suffix says.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file; give YAML files and launch scripts, then overrides as a.b=c")
    if path.suffix not in SCRIPTS + YAMLS:
        raise ValueError(f"{path}: the suffix {path.suffix} is not one of {', '.join((*YAMLS, *SCRIPTS[:-1]))}")
    if path.suffix in YAMLS:
        return Document(path.name, dict(flatten(read_tree(path))))
    with named_errors(path):
        return _read_script(path.name, read_text(path, str(path)), environment)


def read_tree(path: Path) -> dict[str, Any]:
    """Return what a YAML file holds.

    Raises:
        ValueError: it cannot be read, or holds no mapping.
    """
    with named_errors(path):
        tree = read_yaml(read_text(path, str(path)), str(path), loader=Loader, takes_any_key=True)
        if not isinstance(tree, dict):
            raise ValueError("not a mapping of keys to values")
    return tree


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Put the name of the file that is read into errors."""
    try:
        yield
    except TextError:
        raise  # It names the file itself.
    except RecursionError as error:
        raise ValueError(f"{path}: its brackets or commands are nested too deeply to be read") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read_overrides(words: Sequence[str]) -> Document:
    """Return the keys of overrides `a.b=c`, `+a.b=c` and `++a.b=c`.

    Raises:
        ValueError: a word deletes a key (`~a.b`), or has no `=`.
    """
    return document_of_words("command line", [Text(word) for word in words])


def flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys with their values; the items of a list of mappings are numbered, other lists are values."""
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if _is_list_of_sections(tree) else None
    if not children:
        yield prefix, tree
        return
    for key, child in children:
        yield from flatten(child, f"{prefix}.{key}" if prefix else str(key))


def _is_list_of_sections(tree: Any) -> bool:
    return isinstance(tree, list) and bool(tree) and all(isinstance(item, dict) for item in tree)


def _read_script(name: str, text: str, environment: Mapping[str, str]) -> Document:
    script = read_script(text, environment)
    if not script.launches:
        raise ValueError("; ".join(["no command with key=value arguments is launched here", *script.problems]))
    if len(script.launches) > 1:
        raise ValueError(
            f"{len(script.launches)} commands with key=value arguments are launched; give a script with one of them"
        )
    document = document_of_words(name, _flags_joined(script.launches[0]))
    document.notes += [f"{name}, {note}" for note in script.notes]
    document.problems += [f"{name}, {problem}" for problem in script.problems]
    document.program = script.programs[0] if script.programs else ""
    if script.exported:
        document.notes.append(f"{name}: environment variables are not carried over: {', '.join(script.exported)}")
    return document


def _flags_joined(words: Sequence[Text]) -> Iterator[Text]:
    """Yield a program's keys and flags, `--config FILE` as the one word `--config=FILE`; other words are skipped."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        has_value = rest and not rest[0].text.startswith("-") and not OVERRIDE.match(rest[0].text)
        if word.text.startswith("--") and "=" not in word.text and has_value:
            yield Text(f"{word.text}={rest[0].text}", rest.pop(0).notes)
        elif word.text.startswith(("--", "~")) or OVERRIDE.match(word.text):
            yield word


def document_of_words(name: str, words: Iterator[Text] | Sequence[Text]) -> Document:
    document = Document(name)
    for word in words:
        left, equals, right = word.text.partition("=")
        key = left if left.startswith("--") else left.lstrip("+")
        if left.startswith("~"):
            raise ValueError(f"{word.text}: an override cannot delete a key here; leave the key out of its file")
        if not equals and not left.startswith("--"):
            raise ValueError(f"{word.text}: there is no `=`; write key=value")
        for path, value in flatten(_typed(right, key) if equals else True, key):
            document.values[path] = value
            document.caveats.pop(path, None)
            if word.notes:
                document.caveats[path] = "; ".join(dict.fromkeys(word.notes))
    return document


def _typed(text: str, where: str) -> Any:
    """Return the value that a text has in YAML; the text itself, if it is not YAML.

    Raises:
        ValueError: the text is YAML that cannot be taken: it exceeds a limit, or has a key twice. `where` is named.
    """
    try:
        return read_yaml(text, where, loader=Loader, takes_any_key=True)
    except TextError as error:
        if isinstance(error.__cause__, yaml.YAMLError):
            return text
        raise


def resolve(values: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return `values` with interpolations filled in: of other keys and sections, `oc.env` and `oc.select`.

    An interpolation that leads nowhere stays as it is. One of a section becomes the section's keys; those that are
    written count.
    """
    whole = _with_sections(values)
    return {key: _resolved(value, key, whole, environment) for key, value in whole.items()}


def _with_sections(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with the keys of a section in the place of an interpolation of the section.

    Raises:
        ValueError: that makes too many keys.
    """
    whole = dict(values)
    for _ in range(DEEPEST):
        sections = {key: section for key, value in whole.items() if (section := _section(value, key))}
        parts = {key: [part for part in whole if part.startswith(section)] for key, section in sections.items()}
        if not any(parts.values()):
            break
        merged: dict[str, Any] = {}
        for key, value in whole.items():
            for part in parts.get(key, ()):
                merged.setdefault(f"{key}.{part.removeprefix(sections[key])}", _at(part, whole))
            if not parts.get(key):
                merged[key] = value
        if len(merged) > MOST_KEYS:
            raise ValueError(f"interpolations of sections make more than {MOST_KEYS:,} keys, too many to read")
        whole = merged
    return whole


def _section(value: Any, key: str) -> str:
    """Return the section, with a dot at its end, that all of `value` may interpolate; empty if it cannot."""
    match = INTERPOLATION.fullmatch(value) if isinstance(value, str) else None
    section = f"{_absolute(match[1].strip(), key)}." if match is not None and ":" not in match[1] else ""
    return "" if f"{key}.".startswith(section) else section  # A section inside itself would never end.


def _resolved(value: Any, key: str, values: Mapping[str, Any], environment: Mapping[str, str]) -> Any:
    if isinstance(value, list):
        return [_resolved(item, key, values, environment) for item in value]
    for _ in range(DEEPEST):
        match = INTERPOLATION.search(value) if isinstance(value, str) else None
        if match is None:
            return value
        found = _lookup(match[1].strip(), key, values, environment)
        if found is _NOTHING:
            return value
        value = found if match[0] == value else f"{value[: match.start()]}{found}{value[match.end() :]}"
    return value


_NOTHING = object()
"""Stands for a value that was not found; None is a value."""


def _lookup(expression: str, key: str, values: Mapping[str, Any], environment: Mapping[str, str]) -> Any:
    """Return what `${expression}` in the value of `key` stands for; `_NOTHING` if it leads nowhere."""
    resolver, colon, argument = expression.partition(":")
    if not colon:
        return _at(_absolute(expression, key), values)
    name, comma, default = (part.strip() for part in argument.partition(","))
    if resolver == "oc.env" and name in environment:
        return _typed(environment[name], name)
    if resolver == "oc.select" and _absolute(name, key) in values:
        return _at(_absolute(name, key), values)
    if resolver in ARITHMETIC and comma:
        return _calculated(resolver, _typed(name, key), _typed(default, key))
    return _typed(default, key) if comma and resolver in ("oc.env", "oc.select") else _NOTHING


def _calculated(name: str, left: Any, right: Any) -> Any:
    """Return what `${mul:2,3}` and the like stand for; `_NOTHING` if that is no number."""
    if any(isinstance(one, bool) or not isinstance(one, int | float) for one in (left, right)):
        return _NOTHING
    try:
        return ARITHMETIC[name](left, right)
    except ArithmeticError:
        return _NOTHING


def _at(key: str, values: Mapping[str, Any]) -> Any:
    """Return the value of `key`, with its relative interpolations made absolute: they start at `key`."""
    value = values.get(key, _NOTHING)
    if not isinstance(value, str):
        return value
    return INTERPOLATION.sub(lambda match: _made_absolute(match[1], key), value)


def _made_absolute(expression: str, key: str) -> str:
    resolver, colon, argument = expression.partition(":")
    if not colon:
        return f"${{{_absolute(expression.strip(), key)}}}"
    name, comma, default = argument.partition(",")
    return f"${{{resolver}:{_absolute(name.strip(), key)}{comma}{default}}}"


def _absolute(reference: str, key: str) -> str:
    """Return the absolute key: in the value of `a.b.c`, `.x` means `a.b.x` and `..x` means `a.x`."""
    levels = len(reference) - len(reference.lstrip("."))
    if levels == 0:
        return reference
    return ".".join([*key.split(".")[:-levels], reference.lstrip(".")])
