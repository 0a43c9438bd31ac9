"""Errors that the driver raises when a worker fails."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fivefold.observe.errors import RunFailed

TAIL_LINES = 60
"""Last lines of a log that an error shows. A crash prints the stacks of about ten threads after its cause."""

_WARNING = re.compile(r".+:\d+: (\w+\.)*\w*Warning: ")


@dataclass(frozen=True)
class Member:
    """One process of a role, as errors name it."""

    role: str
    rank: int
    host: str
    """IP address of the node it runs on."""
    log: Path
    """File with its standard output and error, on `host`."""
    strategy: PlacementGroupSchedulingStrategy = field(compare=False, repr=False)
    """Puts another process on the same node."""

    def __str__(self) -> str:
        return f"{self.role} rank {self.rank}"


class WorkerError(RunFailed):
    """A worker raised or died. If several did, the error names the most likely cause."""

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


class RayEnded(RunFailed):
    """A server of the run's private Ray ended, and all workers with it."""

    def __init__(self, ending: object, phase: str, logs: Path) -> None:
        self.logs = logs
        """Folder of Ray's own logs."""
        super().__init__(
            f"Ray itself ended on this machine in phase '{phase}': {ending}, and all workers ended with it.\n"
            "If you did not end it, the kernel probably did, because memory ran out: look for 'Out of memory' in\n"
            f"`dmesg` or `journalctl -k`, and run fewer or smaller processes on this machine.\n\nRay's logs: {logs}"
        )


@dataclass(frozen=True)
class LostNode:
    """A machine of the run that went away."""

    host: str
    """IP address."""
    members: tuple[Member, ...]
    """The run's processes on it."""

    def __str__(self) -> str:
        return f"{self.host} ({', '.join(map(str, self.members)) or 'no process of the run'})"


class NodesLost(RunFailed):
    """Machines were lost with the processes on them: their Ray does not answer any more."""

    def __init__(self, lost: Sequence[LostNode], phase: str, n_left: int, head: str | None) -> None:
        """`n_left` is the number of remaining machines, `head` the cluster's head if it is lost."""
        self.lost = tuple(lost)
        self.phase = phase
        plural = "s" if len(lost) > 1 else ""
        are = "are" if len(lost) > 1 else "is"
        if head is not None:
            fix = (
                f"{head} is the head of the Ray cluster, without which Ray works nowhere: start Ray again on the "
                "machines that you have, then the run."
            )
        elif n_left:
            fix = (
                f"Start the run again when the node{plural} {are} back, or without: then with cluster.n_nodes={n_left} "
                "and layouts that fit."
            )
        else:
            fix = f"Start the run again when the node{plural} {are} back, or on others."
        super().__init__(
            f"lost node{plural} {', '.join(map(str, lost))} in phase '{phase}': Ray's process there does not answer "
            f"any more, because it or the whole machine ended, or the network broke.\n{fix}"
        )


class PhaseTimeout(RunFailed):
    """A phase exceeded `scheduler.timeout_s`. The error names the ranks without an answer, with their stacks."""

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
    """Return the last lines of a worker's log without Python's warnings, or why there are none.

    The libraries that a worker imports print some twenty warnings at first, which would hide the cause.
    """
    if not log.is_file():
        return f"(there is no {log})"
    text = _without_warnings(log.read_text(errors="replace").rstrip().splitlines())[-lines:]
    return "\n".join(text) if text else "(only warnings, if anything)"


def _without_warnings(lines: Sequence[str]) -> list[str]:
    """Drop the lines that `warnings.warn` writes: the warning and, indented below it, the line of code."""
    kept = []
    below_warning = False
    for line in lines:
        is_warning = _WARNING.match(line) is not None
        if not is_warning and not (below_warning and line.startswith(" ")):
            kept.append(line)
        below_warning = is_warning
    return kept
