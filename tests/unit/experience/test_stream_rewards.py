"""Rewards beside generation and training, of which a slow one holds up its own group alone."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fivefold.rewards import event_loop
from fivefold.roles.remote_batch import RemoteBatch
from fivefold.roles.reward_model import RewardModel
from fivefold.types import Prompt
from tests.unit.experience.streams import BATCH, PATIENCE_S, SAMPLES, ScriptedWorker, scripted, wait_until


class SlowScores(RewardModel):
    """Scores a sequence by its length, once it may."""

    def __init__(self, may_score: threading.Event) -> None:
        self._may_score = may_score
        self.n_asked: list[int] = []

    def scores(self, batch: RemoteBatch) -> npt.NDArray[np.float64]:
        assert self._may_score.wait(PATIENCE_S)
        self.n_asked.append(len(batch))
        return batch.lengths_N / 4


@pytest.mark.parametrize("of_model", [False, True], ids=["function", "model"])
def test_slow_rewards_do_not_hold_generation(of_model: bool) -> None:
    worker, may_judge = ScriptedWorker(), threading.Event()
    model = SlowScores(may_judge)

    def reward(response: str, ground_truth: Any, **_: Any) -> float:
        assert may_judge.wait(PATIENCE_S)
        return 0.75

    with scripted(worker, model if of_model else reward) as source:
        source.weights_sent(0)
        # One that is finished lets others begin in the same moment, so that none can follow.
        wait_until(source, lambda: source._turns.n_running == 0)
        assert worker.n_answered == 3 * BATCH, "as many as the age admits, and no more"
        may_judge.set()
        for step in (1, 2):
            assert [sample.reward for sample in source.take(step).samples] == [0.75] * BATCH * SAMPLES
    assert max(model.n_asked, default=0) <= BATCH * SAMPLES, "a reward model scores a step's samples at once"


class SlowFirst:
    """Judges by the prompt's number. Its first call ends behind all `n_others`."""

    def __init__(self, n_others: int) -> None:
        self._lock, self._others_are_judged = threading.Lock(), threading.Event()
        self._n_left = n_others
        self._n_begun = self._n_running = self.most_running = 0

    def judge_prompt(self, prompt: Prompt, response: str) -> Any:
        is_first = self._begin()
        if is_first:
            self.wait_for_others()
        return self._end(prompt, is_first)

    def wait_for_others(self) -> None:
        assert self._others_are_judged.wait(PATIENCE_S)

    def _begin(self) -> bool:
        with self._lock:
            self._n_begun += 1
            self._n_running += 1
            self.most_running = max(self.most_running, self._n_running)
            return self._n_begun == 1

    def _end(self, prompt: Prompt, is_first: bool) -> float:
        with self._lock:
            self._n_running -= 1
            self._n_left -= not is_first
            if not self._n_left:
                self._others_are_judged.set()
        return prompt.index / 8


class SlowFirstCoroutine(SlowFirst):
    """The same as a coroutine function."""

    async def judge_prompt(self, prompt: Prompt, response: str) -> Any:
        is_first = self._begin()
        await asyncio.to_thread(self.wait_for_others if is_first else lambda: None)
        return self._end(prompt, is_first)


@pytest.mark.parametrize("kind", [SlowFirst, SlowFirstCoroutine])
def test_a_slow_reward_holds_up_its_own_group_alone(kind: type[SlowFirst], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "N_AT_ONCE", 3)
    event_loop._loop.cache_clear()
    reward, is_coroutine = kind(n_others=3 * BATCH * SAMPLES - 1), kind is SlowFirstCoroutine
    with scripted(ScriptedWorker(), reward, n_threads=3, is_coroutine=is_coroutine) as source:
        source.weights_sent(0)
        for step in (1, 2, 3):
            samples = source.take(step).samples
            assert [sample.reward for sample in samples] == [sample.prompt.index / 8 for sample in samples]
    assert reward.most_running <= 3, "the limit holds over all groups"
    event_loop._loop.cache_clear()
