"""Reports of what workers do, asked for while a call takes long."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from fivefold.observe.progress import Progress

VALID_S = 5.0
"""Seconds after which a report is dropped unless a newer one has come."""


class Reports:
    """The progress of the first rank of each role with its open call.

    The ranks of a role load, save and compute about equal amounts, so only one of them is asked, and only once it has
    answered the previous question. The caller's lock guards it.
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self._asked: dict[ray.ObjectRef[Any], str] = {}
        """Open questions, with the role that was asked."""
        self._latest: dict[str, tuple[float, Progress]] = {}
        """The last report of each role, and its monotonic time."""

    def ask(self, first_ranks: Mapping[str, Any]) -> None:
        """Collect answers, and ask the first ranks of roles with an open call for their progress."""
        self._collect()
        for role in first_ranks.keys() - set(self._asked.values()):
            ref = first_ranks[role].progress.options(concurrency_group="where").remote()
            self._asked[ref] = role

    def latest(self, roles: Collection[str]) -> dict[str, Progress]:
        """Return the progress of each of some roles that has reported lately."""
        oldest = time.monotonic() - VALID_S
        return {role: progress for role, (at, progress) in self._latest.items() if role in roles and at > oldest}

    def _collect(self) -> None:
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
