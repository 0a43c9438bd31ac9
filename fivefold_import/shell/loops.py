"""Loops that count, `for ((i = 0; i < N; i++))`, and files that a script reads with `source`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

COUNTED = re.compile(r"\s*(\w+)\s*=([^;]+);([^;]+);\s*(\w+)\s*(?:(\+\+|--)|([+-])=\s*([^;]+))\s*")
MOST_TURNS = 10_000


@dataclass(frozen=True)
class Counted:
    """The header of a loop that counts."""

    name: str
    start: str
    condition: str
    next: str
    """The expression of the variable's next value."""


def counted(header: str) -> Counted | None:
    """Return what the text between `((` and `))` of a loop says; None if it does not count one variable."""
    match = COUNTED.fullmatch(header)
    if match is None or match[1] != match[4]:
        return None
    step = f"{match[5][0]} 1" if match[5] else f"{match[6]} ({match[7]})"
    return Counted(match[1], match[2], match[3], f"{match[1]} {step}")


def sourced(name: str, folder: Path) -> Path | None:
    """Return the file that a script in `folder` calls `name`; None if there is none.

    What a command would print is missing in the name, as in `$(dirname "$0")/models/a.sh`, and a copy of a repository
    need not stand where the script expects it. So the file is looked for below the folders that the script is in, under
    the whole name first, then under what follows each of its slashes.
    """
    parts = [part for part in name.split("/") if part]
    ends = ["/".join(parts[first:]) for first in range(len(parts))]
    places = [Path(name), *(above / end for end in ends for above in (folder, *folder.parents))]
    return next((place for place in places if place.is_file()), None)
