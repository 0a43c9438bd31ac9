"""Waiting for workers: the first failure anywhere ends every wait, whichever worker was waited for.

open references:   actor.call rank 0..n     wanted
                   rollout.call rank 0      started earlier, not wanted yet
                   hold of every worker     never returns; fails when the process dies
                └─ one ray.wait over all of them
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from fivefold.cluster.errors import Member, PhaseTimeout, WorkerError, tail
from fivefold.cluster.worker import HeldError
from fivefold.observe.errors import RunFailed
from fivefold.observe.timers import PhaseTimers

SETTLE_S = (0.2, 0.5, 2.0)
"""How long to listen for other failures after a first one, by its distance from the cause, which may be among them."""
STACK_TIMEOUT_S = 3.0
"""How long workers that exceed a phase's time get to say where they are."""
MAX_STACKS = 4
"""Stacks shown in a time-out's message."""

_PEER_LOSS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "remote process exited",
    "communicator was aborted",
    "timed out",
)
"""What is heard from ranks whose peer has gone. Gloo and NCCL raise the same types for these and for causes."""


@dataclass(frozen=True)
class Call:
    """One outstanding reference: who is to answer it, and in which phase it was asked."""

    member: Member
    phase: str | None
    """None: whatever phase the driver is in when it fails."""
    actor: Any
    """Handle of the worker."""


@dataclass(frozen=True)
class Failure:
    """A reference that came back as an error."""

    call: Call
    error: RayError

    @property
    def distance(self) -> int:
        """How far from the cause: 0 the process died, 1 it raised, 2 it raised because a peer had gone."""
        if isinstance(self.error, RayActorError):
            return 0
        text = str(self.error).lower()
        return 2 if any(words in text for words in _PEER_LOSS) else 1

    @property
    def text(self) -> str:
        """The worker's traceback, or how its process ended."""
        if isinstance(self.error, RayTaskError) and isinstance(self.error.cause, HeldError):
            return self.error.cause.text
        if isinstance(self.error, RayActorError):
            log = tail(self.call.member.log)
            return f"The process died without a traceback.\n{_how_it_died(self.error)}\nLast lines of its log:\n{log}"
        return str(self.error)


class Watch:
    """All outstanding calls of a session, for one thread that waits or for several.

    Every thread waits on all open references, so that each of them hears of a failure. What one thread finds ready it
    takes for all: the value lies in `_values` until the thread that wants it asks.
    """

    def __init__(self, timers: PhaseTimers, on_failure: Callable[[], None]) -> None:
        self._timers = timers
        self._open: dict[ray.ObjectRef[Any], Call] = {}
        self._values: dict[ray.ObjectRef[Any], Any] = {}
        self._lock = threading.RLock()
        """Guards the two above and what follows."""
        self._ended_by: RunFailed | None = None
        """The failure that ended the workers: every thread raises it."""
        self._on_failure = on_failure

    def reopen(self) -> None:
        """New workers are about to start: an earlier failure has ended those of before."""
        with self._lock:
            self._ended_by = None

    def add(self, ref: ray.ObjectRef[Any], call: Call) -> None:
        """From now on, a failure of `ref` ends any wait."""
        with self._lock:
            self._open[ref] = call

    def wait(self, wanted: Sequence[ray.ObjectRef[Any]], phase: str, timeout_s: float) -> list[Any]:
        """Values of `wanted`, in order; each can be waited for once.

        Raises:
            WorkerError: some worker of the session raised or died.
            PhaseTimeout: `timeout_s` passed first.
        """
        deadline = time.monotonic() + timeout_s
        while missing := self._missing(wanted):
            ready, _ = ray.wait(self._open_refs(), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self._give_up(phase, timeout_s, missing)
            self._take(ready)
        with self._lock:
            return [self._values.pop(ref) for ref in wanted]

    def next(self, stream: ray.ObjectRefGenerator, call: Call, timeout_s: float) -> ray.ObjectRef[Any] | None:
        """Reference to the next item of a `Worker.stream`, None at its end. Raises as `wait` does."""
        phase = call.phase or self._timers.current
        deadline = time.monotonic() + timeout_s
        ahead = self._next(stream, call, phase, deadline, timeout_s)
        if ahead is None:
            return None
        self.add(ahead, call)
        self.wait([ahead], phase, timeout_s)
        return self._next(stream, call, phase, deadline, timeout_s)

    def _next(
        self, stream: ray.ObjectRefGenerator, call: Call, phase: str, deadline: float, timeout_s: float
    ) -> ray.ObjectRef[Any] | None:
        ready: Sequence[Any] = ()
        while stream not in ready:
            self._take([ref for ref in ready if ref is not stream])
            left = max(0.0, deadline - time.monotonic())
            ready, _ = ray.wait([stream, *self._open_refs()], timeout=left, fetch_local=False)
            if not ready:
                self._give_up(phase, timeout_s, [call])
        return next(stream, None)

    def forget(self) -> None:
        """Drops every reference: the workers are gone."""
        with self._lock:
            self._open.clear()
            self._values.clear()

    def _open_refs(self) -> list[ray.ObjectRef[Any]]:
        with self._lock:
            self._raise_if_ended()
            return list(self._open)

    def _missing(self, wanted: Sequence[ray.ObjectRef[Any]]) -> list[Call]:
        """The calls behind those of `wanted` whose values are not here yet."""
        with self._lock:
            self._raise_if_ended()
            return [self._open[ref] for ref in wanted if ref not in self._values]

    def _raise_if_ended(self) -> None:
        if self._ended_by is not None:
            raise self._ended_by

    def _take(self, ready: Sequence[ray.ObjectRef[Any]]) -> None:
        """Moves what is ready from the open references to the values; raises for the first failure.

        Another thread may have taken some of them already.
        """
        with self._lock:
            self._raise_if_ended()
            for ref in ready:
                call = self._open.pop(ref, None)
                if call is None:
                    continue
                try:
                    self._values[ref] = ray.get(ref)
                except RayError as error:
                    self._fail(Failure(call, error))

    def _fail(self, first: Failure) -> None:
        failures = [first, *self._settle(SETTLE_S[first.distance])]
        cause = min(failures, key=lambda failure: failure.distance)
        others = {failure.call.member for failure in failures} - {cause.call.member}
        also = sorted(others, key=lambda member: (member.role, member.rank))
        phase = cause.call.phase or self._timers.current
        self._end(WorkerError(cause.call.member, phase, cause.text, also))

    def _end(self, failure: RunFailed) -> None:
        """Ends all workers, and every wait with `failure`."""
        self._ended_by = failure
        self._on_failure()
        raise failure from None

    def _settle(self, seconds: float) -> list[Failure]:
        """Failures that follow within `seconds`."""
        failures: list[Failure] = []
        deadline = time.monotonic() + seconds
        while self._open and (left := deadline - time.monotonic()) > 0:
            ready, _ = ray.wait(list(self._open), timeout=left)
            for ref in ready:
                call = self._open.pop(ref)
                try:
                    ray.get(ref)
                except RayError as error:
                    failures.append(Failure(call, error))
        return failures

    def _give_up(self, phase: str, seconds: float, calls: Sequence[Call]) -> None:
        with self._lock:
            self._raise_if_ended()
            stacks = _stacks(calls[:MAX_STACKS])
            self._end(PhaseTimeout(phase, seconds, [call.member for call in calls], stacks))


def _stacks(calls: Sequence[Call]) -> str:
    """Where the workers are, as far as they answer."""
    refs = [call.actor.where.options(concurrency_group="where").remote() for call in calls]
    ready, _ = ray.wait(refs, num_returns=len(refs), timeout=STACK_TIMEOUT_S)
    parts = []
    for call, ref in zip(calls, refs, strict=True):
        stack = ray.get(ref) if ref in ready else "  (it does not answer)\n"
        parts.append(f"{call.member} is at:\n{stack}")
    return "\n".join(parts)


def _how_it_died(error: RayActorError) -> str:
    """What Ray knows of the end: an exit code, its own memory watch, or nothing but that the process is gone."""
    text = str(error)
    if found := re.search(r"exit(?:s|ed)? with an exit code \d+", text):
        return found[0][0].upper() + found[0][1:] + "."
    if "memory" in text and "Task was killed" in text:
        return next(line.strip() for line in text.splitlines() if "Task was killed" in line)
    return "It was killed (out of memory?) or crashed in native code."
