"""Waiting for workers: the first failure anywhere ends every wait, whichever worker was waited for.

open references:   actor.call rank 0..n     wanted
                   rollout.call rank 0      started earlier, not wanted yet
                   hold of every worker     never returns; fails when the process dies
                └─ one ray.wait over all of them
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from fivefold.cluster.errors import Member, PhaseTimeout, WorkerError
from fivefold.cluster.failures import LOST_PEER, MAX_STACKS, Call, Failure, stacks
from fivefold.cluster.reports import Reports
from fivefold.observe.errors import RunFailed
from fivefold.observe.progress import Progress
from fivefold.observe.timers import PhaseTimers

SETTLE_S = (0.2, 0.5, 5.0)
"""Seconds to wait for further failures, perhaps the cause, after one of `distance` 0, 1 or 2."""
LOOK_S = 1.0
"""Seconds between checks that Ray is still running."""


Cause = Callable[[Collection[Member]], RunFailed | None]
"""Returns the failure that caused workers to fail, or all workers if none is given: Ray or a machine ended."""


class Watch:
    """All open calls of a session. Several threads may wait at the same time.

    Every thread waits for all open references, so that each of them notices a failure. A value that one thread finds
    ready is kept in `_values` until the thread that wants it asks.
    """

    def __init__(
        self,
        timers: PhaseTimers,
        on_failure: Callable[[], None],
        cause: Cause,
    ) -> None:
        self._timers = timers
        self._open: dict[ray.ObjectRef[Any], Call] = {}
        self._values: dict[ray.ObjectRef[Any], Any] = {}
        self._lock = threading.RLock()
        """Guards `_open`, `_values` and `_ended_by`."""
        self._ended_by: RunFailed | None = None
        """The failure that ended the workers, which every thread raises."""
        self._on_failure = on_failure
        self._cause = cause
        self._reports = Reports()

    def reopen(self) -> None:
        """Forget an earlier failure, which has ended all of its workers: new workers are about to start."""
        with self._lock:
            self._ended_by = None

    def add(self, ref: ray.ObjectRef[Any], call: Call) -> None:
        """Watch `ref`. Its failure ends every wait."""
        with self._lock:
            self._open[ref] = call

    def wait(
        self, wanted: Sequence[ray.ObjectRef[Any]], phase: str, timeout_s: float, began: float | None = None
    ) -> list[Any]:
        """Return the values of `wanted` in order. Each can be waited for once.

        Args:
            wanted: watched references.
            phase: what the wait is for.
            timeout_s: longest time to wait, in seconds.
            began: monotonic time at which `timeout_s` starts; None: the time of this call.

        Raises:
            WorkerError: some worker of the session raised or died.
            PhaseTimeout: `timeout_s` passed first.
        """
        deadline = (time.monotonic() if began is None else began) + timeout_s
        while missing := self._missing(wanted):
            ready = self._listen([], deadline)
            if not ready:
                self._give_up(phase, timeout_s, missing)
            self._take(ready)
        with self._lock:
            return [self._values.pop(ref) for ref in wanted]

    def wait_any(
        self, wanted: Sequence[ray.ObjectRef[Any]], phase: str, timeout_s: float, began: float
    ) -> tuple[ray.ObjectRef[Any], Any]:
        """Return the first of `wanted` that is ready with its value, and forget it. The arguments are as in `wait`."""
        deadline = began + timeout_s
        while not (found := self._found(wanted)):
            # Not until the deadline: another thread may have taken the value after the look at what was found.
            ready = self._listen([], min(deadline, time.monotonic() + LOOK_S))
            if ready:
                self._take(ready)
            elif time.monotonic() >= deadline:
                self._give_up(phase, timeout_s, self._missing(wanted))
            else:
                self._while_idle()
        return found[0]

    def next(self, stream: ray.ObjectRefGenerator, call: Call, timeout_s: float) -> ray.ObjectRef[Any] | None:
        """Return the reference to the next item of a `Worker.stream`, None at its end. Raises what `wait` raises."""
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
            ready = self._listen([stream], deadline, fetch_local=False)
            if not ready:
                self._give_up(phase, timeout_s, [call])
        return next(stream, None)

    def progress(self) -> dict[str, Progress]:
        """Return how far roles are with the calls that are waited for, as their first ranks report it."""
        with self._lock:
            return self._reports.latest(self._first_ranks())

    def _first_ranks(self) -> dict[str, Any]:
        """Return the first rank of each role with an open call, by role."""
        waiting = (call for call in self._open.values() if call.phase is not None and call.member.rank == 0)
        return {call.member.role: call.actor for call in waiting}

    def check(self) -> None:
        """Raise the failure that has ended the workers, if there was one."""
        with self._lock:
            self._raise_if_ended()

    def forget(self) -> None:
        """Drop all references, because the workers are about to end."""
        with self._lock:
            self._open.clear()
            self._values.clear()

    def _listen(self, streams: Sequence[Any], deadline: float, fetch_local: bool = True) -> Sequence[Any]:
        """Return what is ready of `streams` and the open references; nothing if the deadline passes first.

        Workers may notice late or never that Ray has ended, so this is checked meanwhile.
        """
        while True:
            left = max(0.0, deadline - time.monotonic())
            ready, waiting = ray.wait(
                [*streams, *self._open_refs()], timeout=min(left, LOOK_S), fetch_local=fetch_local
            )
            if ready:
                return [*ready, *_ready_too([ref for ref in waiting if ref not in streams], fetch_local)]
            if left <= LOOK_S:
                return []
            self._while_idle()

    def _while_idle(self) -> None:
        """Check that Ray is still running, and ask the workers that have not answered how far they are."""
        self._raise_if_ray_ended()
        with self._lock:
            self._reports.ask(self._first_ranks())

    def _open_refs(self) -> list[ray.ObjectRef[Any]]:
        with self._lock:
            self._raise_if_ended()
            return list(self._open)

    def _missing(self, wanted: Sequence[ray.ObjectRef[Any]]) -> list[Call]:
        """Return the calls of `wanted` whose values are missing."""
        with self._lock:
            self._raise_if_ended()
            return [self._open[ref] for ref in wanted if ref not in self._values]

    def _found(self, wanted: Sequence[ray.ObjectRef[Any]]) -> list[tuple[ray.ObjectRef[Any], Any]]:
        """Return at most one of `wanted` that has a value, with the value, which is removed."""
        with self._lock:
            return [(ref, self._values.pop(ref)) for ref in [ref for ref in wanted if ref in self._values][:1]]

    def _raise_if_ended(self) -> None:
        if self._ended_by is not None:
            raise self._ended_by

    def _raise_if_ray_ended(self, failed: Collection[Member] = ()) -> None:
        with self._lock:
            self._raise_if_ended()
            if (cause := self._cause(failed)) is not None:
                self._end(cause)

    def _take(self, ready: Sequence[ray.ObjectRef[Any]]) -> None:
        """Move what is ready from the open references to the values. Raise for the first failure.

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
        self._raise_if_ray_ended()
        failures = [first, *self._settle(first)]
        self._raise_if_ray_ended({failure.call.member for failure in failures})
        cause = min(failures, key=lambda failure: failure.distance)
        others = {failure.call.member for failure in failures} - {cause.call.member}
        also = sorted(others, key=lambda member: (member.role, member.rank))
        phase = cause.call.phase or self._timers.current
        text = cause.text
        if cause.distance == LOST_PEER:
            text += self._where_others_are(cause.call.member)
        self._end(WorkerError(cause.call.member, phase, text, also))

    def _where_others_are(self, lost: Member) -> str:
        """Return the stacks of the ranks that have not answered while one of their role has lost them."""
        silent = [call for call in self._open.values() if call.phase is not None and call.member.role == lost.role]
        if not silent:
            return ""
        names = ", ".join(str(call.member) for call in silent)
        return f"\n\nIt waited for another rank; no answer from {names}.\n\n{stacks(silent[:MAX_STACKS])}"

    def _end(self, failure: RunFailed) -> None:
        """End all workers, and every wait with `failure`."""
        self._ended_by = failure
        self._on_failure()
        raise failure from None

    def _settle(self, first: Failure) -> list[Failure]:
        """Return failures that soon follow the first one. A failure nearer to the cause shortens the wait."""
        failures: list[Failure] = []
        deadline = time.monotonic() + SETTLE_S[first.distance]
        while self._open and (left := deadline - time.monotonic()) > 0:
            ready, _ = ray.wait(list(self._open), timeout=left)
            for ref in ready:
                call = self._open.pop(ref)
                try:
                    ray.get(ref)
                except RayError as error:
                    failures.append(failure := Failure(call, error))
                    deadline = min(deadline, time.monotonic() + SETTLE_S[failure.distance])
        return failures

    def _give_up(self, phase: str, seconds: float, calls: Sequence[Call]) -> None:
        with self._lock:
            self._raise_if_ray_ended({call.member for call in calls})
            found = stacks(calls[:MAX_STACKS])
            self._end(PhaseTimeout(phase, seconds, [call.member for call in calls], found))


def _ready_too(refs: list[ray.ObjectRef[Any]], fetch_local: bool) -> list[ray.ObjectRef[Any]]:
    """Return which of some references are ready at this moment.

    Each wait looks at all references. If it returned one of them at a time, a call of many ranks would take quadratic
    time: a second for a thousand ranks.
    """
    return ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=fetch_local)[0] if refs else []
