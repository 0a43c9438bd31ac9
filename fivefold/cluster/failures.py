"""Failures of workers: how near each is to the cause, and what their processes and logs say about it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from fivefold.cluster.errors import Member, tail
from fivefold.cluster.worker import HeldError

STACK_TIMEOUT_S = 3.0
"""Seconds that workers get to report their stacks."""
MAX_STACKS = 4
"""Most stacks in a message."""
READ_S = 10.0
"""Seconds that another machine gets to send the end of a log."""

_PEER_LOSS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "remote process exited",
    "communicator was aborted",
    "timed out",
)
"""Messages of ranks that have lost a peer, or waited too long for it. Gloo and NCCL raise the same types for these
as for causes."""

LOST_PEER = 2
"""Distance from the cause of a rank that raised because it had lost a peer."""


@dataclass(frozen=True)
class Call:
    """An open call: its worker, and the driver's phase in which it was made."""

    member: Member
    phase: str | None
    """Phase of the call; None: the phase of the driver when the call fails."""
    actor: Any
    """Handle of the worker."""


@dataclass(frozen=True)
class Failure:
    """A call that was answered by an error."""

    call: Call
    error: RayError

    @property
    def distance(self) -> int:
        """Distance from the cause: 0 the process died, 1 it raised, 2 it raised because it had lost a peer."""
        if isinstance(self.error, RayActorError):
            return 0
        text = str(self.error).lower()
        return LOST_PEER if any(words in text for words in _PEER_LOSS) else 1

    @property
    def text(self) -> str:
        """The worker's traceback, or how its process ended."""
        if isinstance(self.error, RayTaskError) and isinstance(self.error.cause, HeldError):
            return self.error.cause.text
        if isinstance(self.error, RayActorError):
            log = last_lines(self.call.member)
            how = _how_it_died(self.error)
            return f"The process died without a traceback.\n{how}\nLast lines of its log, without warnings:\n{log}"
        return str(self.error)


def stacks(calls: Sequence[Call]) -> str:
    """Return the stacks of the workers that answer in time."""
    refs = [call.actor.where.options(concurrency_group="where").remote() for call in calls]
    ready, _ = ray.wait(refs, num_returns=len(refs), timeout=STACK_TIMEOUT_S)
    parts = []
    for call, ref in zip(calls, refs, strict=True):
        stack = ray.get(ref) if ref in ready else "  (it does not answer)\n"
        parts.append(f"{call.member} is at:\n{stack}")
    return "\n".join(parts)


def _how_it_died(error: RayActorError) -> str:
    """Return what Ray knows of a process's end: an exit code, a kill by its memory monitor, or that it is gone."""
    text = str(error)
    if isinstance(error, ActorUnavailableError):
        return "It was killed (out of memory?) or crashed in native code, or its machine cannot be reached any more."
    if "creation task" in text:
        return text
    if found := re.search(r"exit(?:s|ed)? with an exit code \d+", text):
        return found[0][0].upper() + found[0][1:] + "."
    if "memory" in text and "Task was killed" in text:
        return next(line.strip() for line in text.splitlines() if "Task was killed" in line)
    return "It was killed (out of memory?) or crashed in native code."


def last_lines(member: Member) -> str:
    """Return the last lines of the log of `member`, read by a process on its machine if the file is not on this one."""
    if member.log.is_file():
        return tail(member.log)
    read = ray.remote(tail).options(num_cpus=0, max_retries=0, scheduling_strategy=member.strategy)
    answer = read.remote(member.log)
    ready, _ = ray.wait([answer], timeout=READ_S)
    try:
        return str(ray.get(answer)) if ready else f"(no answer from {member.host} in {READ_S:g} s)"
    except RayError:
        return f"({member.host} cannot be asked for it)"
