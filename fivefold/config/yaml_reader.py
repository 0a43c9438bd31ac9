"""Reads and writes YAML. No text takes long to read, and each problem comes with its line and its fix.

`CoreLoader` reads the scalars of the core schema of YAML 1.2 (https://yaml.org/spec/1.2.2/#103-core-schema), and takes
everything else that has no quotes for a text:

    8, -3, 0x1f, 0o17      whole numbers       012 is 12; 1_000 and 12:30:45 are texts
    0.5, 1e-5, .inf        numbers
    true, True, TRUE       and false alike     yes, no, on and off are texts
    null, ~, nothing       null                2024-01-01 is a text
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from fivefold.config.text_files import MOST_CHARACTERS, TextError

MOST_NODES = 10_000
"""Most values of a text and keys of its mappings, also once every alias is replaced by what it stands for."""
MOST_LEVELS = 50
"""Most lists and mappings inside one another."""
MOST_DIGITS = 100
"""Most characters of a number."""

_STR, _NULL, _BOOL, _INT, _FLOAT, _MERGE, _MAP, _SEQ = (
    f"tag:yaml.org,2002:{name}" for name in ("str", "null", "bool", "int", "float", "merge", "map", "seq")
)
_SCALARS = {
    # None stands for every first character.
    None: [
        (_NULL, re.compile(r"(null|Null|NULL|~|)\Z")),
        (_BOOL, re.compile(r"(true|True|TRUE|false|False|FALSE)\Z")),
        (_INT, re.compile(r"([-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z")),
        (
            _FLOAT,
            re.compile(r"([-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))\Z"),
        ),
        (_MERGE, re.compile(r"<<\Z")),
    ]
}
"""The tags of scalars without quotes, in PyYAML's form: (tag, texts that have it) by the first character."""
_SURROGATE = re.compile(r"[\ud800-\udfff]")


class _Refused(Exception):
    """A text that exceeds a limit, so that no more of it is read."""


class LimitedLoader(yaml.SafeLoader):
    """PyYAML's loader of YAML 1.1, which stops at `MOST_LEVELS` and at `MOST_NODES`."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._n_nodes = 0
        self._level = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Return the next node. PyYAML calls this for each node inside another."""
        self._n_nodes += 1
        self._level += 1
        _check_limits(self._n_nodes, self._level, self.peek_event().start_mark)
        node = super().compose_node(parent, index)
        self._level -= 1
        return node


class CoreLoader(LimitedLoader):
    """A loader with the scalars of YAML 1.2."""

    yaml_implicit_resolvers = _SCALARS

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Return a whole number; only `0o` makes it octal."""
        return int(node.value, 0) if node.value.startswith(("0o", "0x")) else int(node.value)


class CoreDumper(yaml.SafeDumper):
    """Writes what `CoreLoader` reads: a text that would be read as something else gets quotes."""

    yaml_implicit_resolvers = _SCALARS

    def ignore_aliases(self, data: Any) -> bool:
        """Return true, so that a value that occurs twice is written twice."""
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Return the node of a text; one with line breaks of Unicode gets double quotes, where these are escaped.

        In single quotes PyYAML writes NEL as it is, and reads it as a line feed.
        """
        has_breaks = not _BREAKS.isdisjoint(text)
        return self.represent_scalar(_STR, text, style='"' if has_breaks else None)


_BREAKS = frozenset("\x85\u2028\u2029")
CoreDumper.add_representer(str, CoreDumper.represent_text)
CoreLoader.add_constructor(_INT, CoreLoader.construct_yaml_int)


def read_yaml(text: str, where: str, *, loader: type[LimitedLoader] = CoreLoader, takes_any_key: bool = False) -> Any:
    """Return the value of a YAML text: mappings, lists, texts, numbers, true, false and null.

    Args:
        text: the text; an empty one is null.
        where: what errors call the text, such as the name of its file.
        loader: decides what a scalar without quotes is.
        takes_any_key: take keys that are numbers, true or false for the texts that are written, instead of refusing
            them.

    Raises:
        TextError: the text is not YAML, or exceeds a limit; a mapping has a key twice or a key that is not a text; or a
            value has a YAML tag or holds half a character.
    """
    if len(text) > MOST_CHARACTERS:
        raise TextError(where, [f"{len(text):,} characters are more than the {MOST_CHARACTERS:,} that are read"])
    if half := _SURROGATE.search(text):
        line = text.count("\n", 0, half.start()) + 1
        raise TextError(where, [f"{half.group()!a} in line {line} is half a character; write whole ones in UTF-8"])
    try:
        reader = loader(text)
        try:
            node = reader.get_single_node()
            values = _Values(reader, takes_any_key=takes_any_key)
            value = None if node is None else values.of(node, "")
        finally:
            reader.dispose()
    except yaml.YAMLError as error:
        raise TextError(where, [f"not YAML: {_one_line(error)}; correct it, or quote it if it is a text"]) from error
    except _Refused as error:
        raise TextError(where, [str(error)]) from error
    if values.problems:
        raise TextError(where, values.problems)
    return value


def write_yaml(value: Any) -> str:
    """Return a text that `read_yaml` reads as `value`."""
    return yaml.dump(value, Dumper=CoreDumper, sort_keys=False, allow_unicode=True, default_flow_style=False)


class _Values:
    """Makes values of the nodes of one text, and collects the problems of all of them."""

    def __init__(self, reader: LimitedLoader, *, takes_any_key: bool) -> None:
        self.problems: list[str] = []
        self._reader = reader
        self._takes_any_key = takes_any_key
        self._n_nodes = 0
        self._open: list[yaml.Node] = []

    def of(self, node: yaml.Node, path: str) -> Any:
        """Return the value of `node`, whose keys lead there by `path`; null where there is a problem."""
        if any(node is outer for outer in self._open):
            raise _Refused(
                f"{_short(path)}: an alias in it stands for the value of line {_line(node)}, which holds the alias"
            )
        self._open.append(node)
        self._n_nodes += 1
        _check_limits(self._n_nodes, len(self._open), node.start_mark)
        try:
            if isinstance(node, yaml.ScalarNode):
                return self._scalar(node, path)
            if node.tag not in (_MAP, _SEQ):
                self._problem(path, f"the tag {_short(node.tag)} in line {_line(node)} has no meaning; drop it")
                return None
            if isinstance(node, yaml.SequenceNode):
                return [
                    self.of(item, f"{path}.{index}" if path else str(index)) for index, item in enumerate(node.value)
                ]
            assert isinstance(node, yaml.MappingNode), "the third kind of node"
            return self._mapping(node, path)
        finally:
            self._open.pop()

    def _scalar(self, node: yaml.ScalarNode, path: str) -> Any:
        tag, text = node.tag, node.value
        if tag != _STR and tag != self._reader.resolve(yaml.ScalarNode, text, (True, False)):
            self._problem(path, f"the tag {_short(tag)} in line {_line(node)} has no meaning here; drop it")
            return None
        if tag in (_INT, _FLOAT) and len(text) > MOST_DIGITS:
            rule = f"a number has at most {MOST_DIGITS} digits; quote it if it is a text"
            self._problem(path, f"{len(text):,} digits in line {_line(node)}: {rule}")
            return None
        try:
            value = self._reader.construct_object(node)
        except ValueError as error:  # such as a date of the 13th month, under YAML 1.1
            self._problem(path, f"{text} in line {_line(node)}: {error}; quote it if it is a text")
            return None
        if isinstance(value, str) and (half := _SURROGATE.search(value)):
            rule = "is half a character; write whole ones in UTF-8"
            self._problem(path, f"{half.group()!a} in line {_line(node)} {rule}")
            return None
        return value

    def _mapping(self, node: yaml.MappingNode, path: str) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        written: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE:
                merged |= self._merged(value_node, path)
                continue
            key = self._key(key_node, path)
            if key is None:
                continue
            inner = f"{path}.{key}" if path else key
            if key in lines:
                self._problem(inner, f"given twice, in lines {lines[key]} and {_line(key_node)}; keep one")
            lines.setdefault(key, _line(key_node))
            written[key] = self.of(value_node, inner)
        return merged | written

    def _merged(self, node: yaml.Node, path: str) -> dict[str, Any]:
        """Return the keys that `<<` takes from one mapping, or from several; the first counts."""
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        keys: dict[str, Any] = {}
        for source in sources:
            if not isinstance(source, yaml.MappingNode):
                self._problem(path, f"`<<` in line {_line(node)} takes the keys of mappings, and of nothing else")
                return {}
            keys = self.of(source, path) | keys
        return keys

    def _key(self, node: yaml.Node, path: str) -> str | None:
        """Return a key; None where there is a problem."""
        place = f"in line {_line(node)}"
        if not isinstance(node, yaml.ScalarNode):
            self._problem(path, f"a list or a mapping is the key {place}; a key is a text")
            return None
        if node.tag == _NULL:
            self._problem(path, f"a key is missing before the `:` {place}; write key: value, or quote the key")
            return None
        if node.tag != _STR and not self._takes_any_key:
            self._problem(path, f"the key {_short(node.value)} {place} is not a text; quote it")
            return None
        if _SURROGATE.search(node.value):
            self._problem(path, f"the key {place} has half a character; write whole ones in UTF-8")
            return None
        return node.value

    def _problem(self, path: str, line: str) -> None:
        self.problems.append(f"{_short(path)}: {line}" if path else line)


def _check_limits(n_nodes: int, level: int, mark: yaml.Mark) -> None:
    """Refuse the text at the node that begins at `mark`.

    Raises:
        _Refused: the node is one too many, or one too deep.
    """
    if level > MOST_LEVELS:
        raise _Refused(
            f"line {mark.line + 1} is inside {level - 1} lists and mappings; write at most {MOST_LEVELS} inside one "
            "another"
        )
    if n_nodes > MOST_NODES:
        raise _Refused(
            f"there are more than {MOST_NODES:,} keys and values, counting each alias as what it stands for, by line "
            f"{mark.line + 1}; write fewer"
        )


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def _one_line(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        context = f"{error.context}, " if str(error.problem).startswith("but ") else ""
        return f"{context}{error.problem} in line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"
    return " ".join(str(error).split())
