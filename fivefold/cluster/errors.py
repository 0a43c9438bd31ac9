"""What the driver is told when a worker fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fivefold.observe.errors import RunFailed

TAIL_LINES = 40


@dataclass(frozen=True)
class Member:
    """One process of a role, as errors name it."""

    role: str
    rank: int
    host: str
    """IP address of the node it runs on."""
    log: Path
    """File that its standard output and error go to (on `host`)."""

    def __str__(self) -> str:
        return f"{self.role} rank {self.rank}"


class WorkerError(RunFailed):
    """A worker raised or died. The first cause, as far as it can be told, is the one named."""

    def __init__(self, member: Member, phase: str, traceback_text: str, also: Sequence[Member] = ()) -> None:
        self.role = member.role
        self.rank = member.rank
        self.phase = phase
        self.traceback_text = traceback_text
        """The worker's traceback, or how its process ended and the last lines of its log."""
        self.log = member.log
        others = f"\nFailed with it: {', '.join(map(str, also))}" if also else ""
        super().__init__(
            f"{member} failed in phase '{phase}' on {member.host}\n\n"
            f"{traceback_text.strip()}\n\nLog: {member.log}{others}"
        )


class PhaseTimeout(RunFailed):
    """A phase took longer than `scheduler.timeout_s`; names the ranks that have not answered and where they are."""

    def __init__(self, phase: str, seconds: float, waiting: Sequence[Member], where: str) -> None:
        self.phase = phase
        self.waiting = tuple(waiting)
        names = ", ".join(map(str, waiting))
        logs = "\n".join(f"Log: {member.log}" for member in waiting[:4])
        super().__init__(
            f"phase '{phase}' took longer than scheduler.timeout_s={seconds:g} s; no answer from {names}.\n"
            f"If the phase is only slow, raise scheduler.timeout_s.\n\n{where.strip()}\n\n{logs}"
        )


def tail(log: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a worker's log, or a word on why there are none."""
    if not log.is_file():
        return f"(no log at {log} on this machine)"
    text = log.read_text(errors="replace").rstrip().splitlines()[-lines:]
    return "\n".join(text) if text else "(its log is empty)"
