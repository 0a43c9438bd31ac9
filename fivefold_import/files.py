"""Files that a source names: they may be relative to any folder that the source is in."""

from __future__ import annotations

from pathlib import Path

from fivefold.config.paths import user_path


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
