"""What workers report of their progress, while the driver waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

import ray
from ray.exceptions import RayError

from fivefold.cluster.errors import Member
from fivefold.observe.progress import Progress

VALID_S = 5.0
"""Seconds after which a report that no other one has followed is dropped."""


class Reports:
    """The progress of the first rank of each role with the call that it has not answered.

    A role's ranks load, save and compute about the same amounts, so that one of them is asked, in a thread of its own,
    and never while it has not answered the question before.
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self._asked: dict[ray.ObjectRef[Any], str] = {}
        """Questions without an answer, with the role that is asked."""
        self._latest: dict[str, tuple[float, Progress]] = {}
        """The last report of each role, and its monotonic time."""
        self._lock = threading.Lock()

    def ask(self, calls: Iterable[tuple[Member, Any]]) -> None:
        """Take the answers that have come, and ask first ranks how far they are.

        Args:
            calls: all calls without an answer, each by its member and its worker.
        """
        first = {member.role: worker for member, worker in calls if member.rank == 0}
        with self._lock:
            self._take()
            # A role may have answered its call since it was asked.
            self._latest = {role: latest for role, latest in self._latest.items() if role in first}
            for role in first.keys() - set(self._asked.values()):
                ref = first[role].progress.options(concurrency_group="where").remote()
                self._asked[ref] = role

    def forget(self, member: Member) -> None:
        """Drop what a first rank has reported, because it has answered its call."""
        if member.rank == 0:
            with self._lock:
                self._latest.pop(member.role, None)

    def latest(self) -> dict[str, Progress]:
        """Return the progress of each role that has reported some lately."""
        oldest = time.monotonic() - VALID_S
        with self._lock:
            return {role: progress for role, (at, progress) in self._latest.items() if at > oldest}

    def _take(self) -> None:
        if not self._asked:
            return
        ready, _ = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)
        for ref in ready:
            role = self._asked.pop(ref)
            try:
                progress = ray.get(ref)
            except RayError:  # the wait for the worker's call raises what has happened to it
                continue
            if progress is None:
                self._latest.pop(role, None)
            else:
                self._latest[role] = (time.monotonic(), progress)
