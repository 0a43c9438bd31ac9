"""Groups on their way from generation to their rewards.

generation   groups ──add──> FinishedGroups ──take──> rewards of all that have finished meanwhile
(a thread)                                            (a thread of the stream; the main thread of a step)
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from fivefold.experience.samples import judged, rewarded
from fivefold.observe.timers import PhaseTimers
from fivefold.rewards.reward_set import RewardSet
from fivefold.roles.responses import Generated, Group
from fivefold.roles.reward_model import RewardModel
from fivefold.roles.rollout import Finished
from fivefold.types import Sample

ENDING_S = 30.0
"""Seconds that threads have to end, which they do after their slice on the replicas or their rewards."""


class Abandoned(Exception):
    """Nobody waits for further groups, because their rewards have failed."""


class FinishedGroups:
    """Groups that have finished and wait for their rewards. Any thread may add some."""

    def __init__(self) -> None:
        """Begin without a group."""
        self._groups: list[Group] = []
        self._has_ended = False
        self._is_abandoned = False
        self._changed = threading.Condition()

    def __len__(self) -> int:
        """Return the number of groups that wait."""
        return len(self._groups)

    def add(self, groups: list[Group]) -> None:
        """Add groups that have finished.

        Raises:
            Abandoned: no more are taken.
        """
        with self._changed:
            if self._is_abandoned:
                raise Abandoned
            self._groups += groups
            self._changed.notify_all()

    def take(self, at_most: int | None = None) -> list[Group]:
        """Wait for groups, and return those that wait, `at_most` of the first in the data's order; none: no more come.

        Those that have finished meanwhile are judged together, because rewards are computed concurrently.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._groups or self._has_ended)
            if at_most is not None:
                self._groups.sort(key=lambda group: group.number)
            groups, self._groups = self._groups[:at_most], self._groups[at_most:] if at_most else []
            return groups

    def end(self) -> None:
        """Add no more groups."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def abandon(self) -> None:
        """Take no more groups."""
        with self._changed:
            self._is_abandoned = self._has_ended = True
            self._groups = []
            self._changed.notify_all()


class _Generation(threading.Thread):
    """Generates in a thread of its own, and waits there for the rewards, which the phase `rewards` counts."""

    def __init__(
        self, generate: Callable[[Finished], Generated], finished: FinishedGroups, timers: PhaseTimers
    ) -> None:
        super().__init__(name="rollout", daemon=True)
        self._generate = generate
        self._finished = finished
        self._timers = timers
        self._are_judged = threading.Event()
        self._result: Generated | BaseException | None = None

    def run(self) -> None:
        """Generate, and wait until the rewards are computed."""
        try:
            with self._timers.phase("rollout"):
                self._result = self._generate(self._finished.add)
            self._finished.end()
            with self._timers.phase("rewards"):
                self._are_judged.wait()
        except BaseException as error:  # noqa: BLE001 - `result` raises it
            self._result = error
            self._finished.abandon()

    def judged(self) -> None:
        """Take note that no rewards are computed any more."""
        self._are_judged.set()
        self.join(ENDING_S)

    def result(self) -> Generated:
        """Return what was generated, or raise the failure."""
        if isinstance(self._result, BaseException):
            raise self._result
        assert self._result is not None
        return self._result


def generate_and_judge(
    generate: Callable[[Finished], Generated], rewards: RewardSet, timers: PhaseTimers, model: RewardModel | None = None
) -> tuple[Generated, list[Sample]]:
    """Generate samples in a second thread, and compute the rewards of each group in this one as soon as it is there.

    Functions are called on this thread, because some need the main one: signals, which limit their time, reach no
    other. A reward model scores all samples behind the last one: its micro-batches are then the same in every run.

    Args:
        generate: generates samples, and tells its argument of groups as they finish.
        rewards: the recipe's rewards.
        timers: count the generation as `rollout`, and how long the rewards outlast it as `rewards`.
        model: the reward model, if one of the rewards is its score.

    Returns:
        The samples without rewards, and with them.
    """
    finished = FinishedGroups()
    generation = _Generation(generate, finished, timers)
    generation.start()
    values: dict[int, dict[str, float]] = {}
    try:
        while groups := finished.take():
            samples = [sample for group in groups for sample in group.samples]
            numbers = [group.number + place for group in groups for place in range(len(group.samples))]
            values |= zip(numbers, judged(samples, rewards), strict=True)
    finally:
        finished.abandon()
        generation.judged()
    generated = generation.result()
    with timers.phase("rewards"):
        return generated, rewarded(generated, [values[index] for index in range(len(values))], rewards, model)
