"""One line of the report, and the words that several checks share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "problem"]
STATUSES: tuple[Status, ...] = ("ok", "warning", "problem")
"""From good to bad."""
NOTHING_TO_DO = "nothing to do"
GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """What was looked at, what was found there, and what follows."""

    name: str
    status: Status
    """`warning`: training works, but worse than it could, or only some of it. `problem`: it does not work."""
    found: str
    advice: str
    """What to do about it; of what is fine, what it is good for."""
    details: tuple[str, ...] = ()
    """Lines to show below, such as the end of a log."""


def worst(findings: Iterable[Finding]) -> Status:
    """The status of all of them together."""
    return max((finding.status for finding in findings), key=STATUSES.index, default="ok")


def pip_install(*requirements: object) -> str:
    """The command that installs them."""
    return "pip install " + " ".join(f"'{requirement}'" for requirement in requirements)


def gib(n_bytes: float) -> str:
    """12.3 GiB."""
    size = n_bytes / GIB
    return f"{size:,.0f} GiB" if size >= 100 else f"{size:.1f} GiB"
