"""One line of the report, and the phrases that several checks share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "problem"]
STATUSES: tuple[Status, ...] = ("ok", "warning", "problem")
"""All statuses, from the best to the worst."""
NOTHING_TO_DO = "nothing to do"
GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """What was examined, what was found, and what to do about it."""

    name: str
    """What was examined."""
    status: Status
    """With a `warning`, training works, but slowly or only in part. With a `problem`, it does not work."""
    found: str
    """What was found."""
    advice: str
    """What to do about it; if the status is `ok`, what it can be used for."""
    details: tuple[str, ...] = ()
    """Lines to print below the finding, such as the end of a log."""


def worst(findings: Iterable[Finding]) -> Status:
    """Return the worst status of the findings; `ok` if there are none."""
    return max((finding.status for finding in findings), key=STATUSES.index, default="ok")


def pip_install(*requirements: object) -> str:
    """Return the command that installs the requirements."""
    return "pip install " + " ".join(f"'{requirement}'" for requirement in requirements)


def gib(n_bytes: float) -> str:
    """Return a size in GiB as text, such as `12.3 GiB`."""
    size = n_bytes / GIB
    return f"{size:,.0f} GiB" if size >= 100 else f"{size:.1f} GiB"
