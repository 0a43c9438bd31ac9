"""A file of lines that a run writes while a page about it is open."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass
class GrowingLines:
    """Reads the lines that were added since the last time; a resumed run may have cut the file back meanwhile."""

    path: Path
    _offset: int = 0
    """Where the next line begins."""
    _last: bytes = b""
    """The line before it."""

    @property
    def at_start(self) -> bool:
        """Whether no line has been read."""
        return self._offset == 0

    def begin_anew_if_changed(self) -> bool:
        """Return whether lines that were read have gone or have others in their place; then all are read again.

        A file that was cut back may have grown beyond its earlier size since, and may have its earlier number: whether
        it is the same shows in the line that was read last.
        """
        if self.at_start or self._has_last():
            return False
        self.rewind()
        return True

    def rewind(self) -> None:
        """Begin with the first line again."""
        self._offset, self._last = 0, b""

    def new(self) -> Iterator[tuple[int, bytes]]:
        """Yield the place and the bytes of each whole line that has come; a missing file has none."""
        if not self.path.is_file():
            return
        with self.path.open("rb") as lines:
            lines.seek(self._offset)
            for line in lines:
                if not line.endswith(b"\n"):  # it is still being written
                    return
                place, self._offset, self._last = self._offset, self._offset + len(line), line
                yield place, line

    def _has_last(self) -> bool:
        try:
            with self.path.open("rb") as lines:
                lines.seek(self._offset - len(self._last))
                return lines.read(len(self._last)) == self._last
        except FileNotFoundError:
            return False
