"""Files that a source names: texts, which may be relative to any folder that the source is in, and `defaults`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fivefold.config.paths import user_path
from fivefold_import.source import read_tree

DEFAULTS = "defaults"
"""Key of the YAML files that a YAML file builds on."""
DEEPEST = 20
"""The longest chain of `defaults`, so that a file that names itself ends in an error."""


class FileText(str):
    """The name of a text, with the text itself, which another file has."""

    content: str

    @staticmethod
    def of(name: str, content: str) -> FileText:
        """Return a name with its text."""
        named = FileText(name)
        named.content = content
        return named


def find(source: Path, name: str) -> Path | None:
    """Return the file that a source calls `name`: it may be relative to any folder that the source is in."""
    places = [user_path(name), *(folder / name for folder in source.absolute().parents)]
    return next((place for place in places if place.is_file()), None)


def tree_and_defaults(path: Path, deepest: int) -> tuple[dict[str, Any], list[Any]]:
    """Return the tree of a YAML file, and what its `defaults` name.

    Args:
        path: the file.
        deepest: how long the chain of `defaults` may still be.

    Raises:
        ValueError: the file cannot be read, or the chain is too long.
    """
    if deepest == 0:
        raise ValueError(f"{path}: its `{DEFAULTS}` lead to more than {DEEPEST} files, or back to itself")
    tree = read_tree(path)
    named = tree.pop(DEFAULTS, None) or []
    return tree, named if isinstance(named, list) else [named]
