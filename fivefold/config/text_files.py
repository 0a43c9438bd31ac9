"""Reads the text files that a user names."""

from __future__ import annotations

import stat
from collections.abc import Sequence
from pathlib import Path

MOST_CHARACTERS = 300_000
"""Most characters of a text: a hundred times as many as a long recipe has."""
_MOST_BYTES = 4 * MOST_CHARACTERS


class TextError(ValueError):
    """A text that cannot be read; `problems` holds one line for each problem."""

    def __init__(self, where: str, problems: Sequence[str]) -> None:
        super().__init__(f"{where}: {'; '.join(problems)}")
        self.problems = tuple(problems)


def read_text(path: Path, where: str) -> str:
    """Return the text of a file in UTF-8, without the byte order mark that it may begin with.

    Args:
        path: the file.
        where: what errors call it.

    Raises:
        TextError: there is no such file, it is not a file, or it cannot be read, is too long or is not UTF-8.
    """
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise TextError(where, ["it is a folder, not a file"])
        if not stat.S_ISREG(status.st_mode):
            raise TextError(where, ["it is a pipe or a device, not a file: write its text to a file first"])
        if status.st_size > _MOST_BYTES:
            raise TextError(where, [f"it has {status.st_size:,} bytes, and at most {_MOST_BYTES:,} are read"])
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise TextError(where, ["it does not exist"]) from error
    except OSError as error:
        raise TextError(where, [f"it cannot be read ({error.strerror})"]) from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        reason = f"{error.reason} at byte {error.start}, in line {line}"
        raise TextError(where, [f"it is not a text in UTF-8 ({reason}): save it as UTF-8"]) from error
