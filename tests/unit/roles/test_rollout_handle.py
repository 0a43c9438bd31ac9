"""Completions of replicas some of which end before they have answered all that they took."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from fivefold.roles.responses import Responses
from fivefold.roles.rollout import Rollout
from fivefold.roles.rollout_worker import Job
from fivefold.rollout.protocol import SamplingParams
from fivefold.types import Completion, Prompt, Trajectory

SAMPLING = SamplingParams(16, 0, False, 1.0, 1.0, 0, (), ())


class DyingReplicas:
    """A replica that answers all but the jobs of some prompts, with which its server dies for the first time."""

    def __init__(self, deadly: set[int]) -> None:
        self._deadly = deadly
        self.asked: list[list[int]] = []

    def __len__(self) -> int:
        return 1

    def deal(
        self, method: Callable[..., Any], jobs: Sequence[Job], sampling: Any, size: int, may_end: bool
    ) -> Iterator[list[tuple[int, Responses, None]]]:
        self.asked.append([job.prompts[0].index for job in jobs])
        for job in jobs:
            index = job.prompts[0].index
            if index in self._deadly:
                self._deadly.discard(index)
                if not may_end:
                    raise OSError("the server has died")
                continue
            done = [Trajectory.single_turn(prompt, Completion.of([5], [-1.0], "stop", 0)) for prompt in job.prompts]
            yield [(0, Responses.of(list(job.indices), done, [str(index)] * size), None)]


def test_what_a_server_was_answering_when_it_died_is_asked_for_once_more() -> None:
    replicas, renewed = DyingReplicas({1, 3}), []
    rollout = Rollout(replicas, shares_devices=False, is_server=True)  # type: ignore[arg-type]
    prompts = [Prompt(index, "", (3, 4), "") for index in range(5)]
    finished: list[int] = []
    generated = rollout.generate(
        prompts,
        2,
        SAMPLING,
        ("key",),
        lambda groups: finished.extend(group.number for group in groups),
        renew=lambda: renewed.append(len(finished)),
    )
    assert [sample.response_text for sample in generated.samples] == [str(i) for i in range(5) for _ in range(2)]
    assert replicas.asked == [[0, 1, 2, 3, 4], [1, 3]]
    assert finished == [0, 4, 8, 2, 6]
    assert renewed == [3], "replicas get weights before they are asked again"
    with pytest.raises(OSError, match="the server has died"):
        Rollout(DyingReplicas({2}), False, is_server=True).generate(prompts, 2, SAMPLING, ("key",))  # type: ignore[arg-type]
