"""Where a step's samples come from: dynamic sampling, its bound and its position, and greedy baselines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fivefold.config.load import load_recipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.data.sampler import EpochSampler, Outcome
from fivefold.experience.step import StepSource
from fivefold.observe.timers import PhaseTimers
from fivefold.rewards.reward import NamedReward
from fivefold.rewards.reward_set import RewardSet, WeightedReward
from fivefold.roles.remote_batch import RemoteBatch
from fivefold.roles.responses import Generated, Group
from fivefold.roles.rollout import Finished, Rollout, ignore
from fivefold.rollout.protocol import SamplingParams
from fivefold.types import Prompt, Sample

QUICKSTART = Path(__file__).resolve().parents[3] / "recipes" / "quickstart.yaml"
BATCH, SAMPLES = 4, 2


class NumberedRollout(Rollout):
    """Answers each prompt with the number of the sample; a sequence's length is its prompt's index and that number."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], int, bool, tuple[Any, ...]]] = []
        self.shares: list[float] = []

    def generate(
        self,
        prompts: Sequence[Prompt],
        n_samples: int,
        sampling: SamplingParams,
        key: tuple[int | str, ...],
        finished: Finished = ignore,
        renew: Callable[[], None] | None = None,
    ) -> Generated:
        self.shares.append(sampling.logprob_share)
        self.asked.append(([prompt.index for prompt in prompts], n_samples, sampling.greedy, key))
        pairs = [(prompt, number) for prompt in prompts for number in range(n_samples)]
        samples = [Sample(p, str(number), "stop", 10 * p.index + number, 1, (0, 0)) for p, number in pairs]
        lengths = np.array([sample.n_tokens for sample in samples])
        batch = RemoteBatch(lengths, np.ones(len(samples), np.int64), ())
        starts = range(0, len(samples), n_samples)
        parts = [range(start, start + n_samples) for start in starts]
        for part in reversed(parts):
            finished([Group(part.start, samples[part.start : part.stop], batch.select(part))])
        return Generated(samples, batch, {"replica_busy/min": 1.0})


def judge(response: str, ground_truth: Any, **_: Any) -> float:
    """Reward the second sample, where the prompt has a signal."""
    return float(response == "1" and ground_truth)


def source(
    with_signal: set[int], n_prompts: int, *overrides: str, corrects: Callable[[], bool] = lambda: False
) -> tuple[StepSource, NumberedRollout]:
    words = ["actor.ppo_n_minibatches=1", f"train_dataset.batch_size={BATCH}", f"gconfig.n_samples={SAMPLES}"]
    recipe = load_recipe(QUICKSTART, [*words, *overrides], TrainRecipe)
    prompts = [Prompt(i, "?", (1,), i in with_signal) for i in range(n_prompts)]
    sampler = EpochSampler(prompts, batch_size=BATCH, shuffle=False, seed=1)
    rollout = NumberedRollout()
    sampling = SamplingParams.for_training(recipe)
    rewards = RewardSet.of(NamedReward("judge", judge, None))
    return StepSource(recipe, sampler, rollout, sampling, rewards, PhaseTimers(), corrects), rollout


def test_prompts_without_signal_are_replaced_by_further_ones() -> None:
    steps, rollout = source({1, 4, 6, 9, 10, 11}, 40, "actor.dynamic_sampling=true")
    taken = steps.take(1)
    assert list(dict.fromkeys(taken.groups)) == [1, 4, 6, 9]
    assert taken.groups == [1, 1, 4, 4, 6, 6, 9, 9]
    # The batch has the same sequences as the samples.
    assert taken.batch.lengths_N.tolist() == [sample.n_tokens for sample in taken.samples] == [
        10, 11, 40, 41, 60, 61, 90, 91,
    ]  # fmt: skip
    assert taken.metrics["dynamic_sampling/rounds"] == 3
    assert taken.metrics["dynamic_sampling/kept"] == 6 / 12
    assert len({key for *_, key in rollout.asked}) == 3, "each round has random choices of its own"
    # A run that goes on from a checkpoint reads what this run would read next.
    position = steps.sampler.state_dict()
    again, later = source({1, 4, 6, 9, 10, 11}, 40, "actor.dynamic_sampling=true")
    again.sampler.load_state_dict(position)
    steps.take(2)
    again.take(2)
    assert later.asked == rollout.asked[3:]
    assert later.asked[0][0] == [12, 13, 14, 15]


def test_all_log_probs_are_asked_for_once_the_loss_is_corrected() -> None:
    answers = iter([False, True])
    steps, rollout = source(set(), 40, corrects=lambda: next(answers))
    steps.take(1)
    steps.take(2)
    assert rollout.shares == [1 / 8, 1.0]


def test_prompts_without_signal_fill_a_step_after_the_last_round() -> None:
    steps, rollout = source({5}, 40, "actor.dynamic_sampling=true", "actor.dynamic_sampling_max_rounds=2")
    taken = steps.take(1)
    assert len(rollout.asked) == 2
    assert sorted(set(taken.groups)) == [0, 1, 2, 5]
    assert len(taken.samples) == BATCH * SAMPLES


def test_rewards_that_differ_one_by_one_are_a_signal_for_gdpo_though_their_sums_are_equal() -> None:
    def mirrored(response: str, ground_truth: Any, **_: Any) -> float:
        return -judge(response, ground_truth)

    both = RewardSet(tuple(WeightedReward(NamedReward(each.__name__, each, None)) for each in (judge, mirrored)))
    for algorithm, found in {"grpo": [0, 1, 2, 3], "gdpo": [1, 4, 6, 9]}.items():
        steps, _ = source({1, 4, 6, 9}, 40, "actor.dynamic_sampling=true", f"algorithm={algorithm}")
        taken = replace(steps, rewards=both).take(1)
        assert list(dict.fromkeys(taken.groups)) == found
    # A reward of weight 0 is measured, and teaches nothing.
    measured = RewardSet(tuple(replace(each, weight=0.0) for each in both.rewards))
    steps, _ = source({1, 4, 6, 9}, 40, "actor.dynamic_sampling=true", "algorithm=gdpo")
    assert list(dict.fromkeys(replace(steps, rewards=measured).take(1).groups)) == [0, 1, 2, 3]


def test_sums_that_differ_by_rounding_are_no_signal() -> None:
    assert (0.1 + 0.2) + 0.3 != (0.3 + 0.2) + 0.1

    def part(values: str) -> Callable[..., float]:
        def reward(response: str, ground_truth: Any, **_: Any) -> float:
            return float(values[int(response) if ground_truth else 0]) / 10

        return reward

    parts = [WeightedReward(NamedReward(values, part(values), None)) for values in ("13", "22", "31")]
    steps, _ = source({1, 4, 6, 9}, 40, "actor.dynamic_sampling=true")
    taken = replace(steps, rewards=RewardSet(tuple(parts))).take(1)
    assert len({sample.reward for sample in taken.samples if sample.prompt.index == 1}) == 2
    assert taken.metrics["dynamic_sampling/kept"] == 0


def test_rewards_that_the_clip_makes_equal_are_no_signal() -> None:
    for clip, kept in ((5.5, 4 / 12), (5.0, 0.0)):
        overrides = ("actor.dynamic_sampling=true", "actor.reward_bias=5", f"actor.reward_clip={clip}")
        steps, _ = source({1, 4, 6, 9}, 40, *overrides, "actor.overlong_reward_penalty=true", "actor.length_penalty=1")
        assert steps.take(1).metrics["dynamic_sampling/kept"] == kept


def test_a_step_has_no_prompt_twice_though_it_reads_on_into_the_next_epoch() -> None:
    steps, rollout = source({2}, 8, "actor.dynamic_sampling=true", "actor.dynamic_sampling_max_rounds=9")
    taken = steps.take(1)
    assert len(set(taken.groups)) == BATCH
    assert all(taken.groups.count(group) == SAMPLES for group in taken.groups)
    assert [asked for asked, *_ in rollout.asked] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_samplers_are_told_what_each_prompt_earned_in_every_round() -> None:
    steps, _ = source({1, 4, 6}, 8, "actor.dynamic_sampling=true", "actor.dynamic_sampling_max_rounds=9")
    told: list[Sequence[Outcome]] = []
    steps.sampler.told = told.append  # type: ignore[method-assign]
    steps.take(1)
    # The third batch begins the next epoch, whose prompts the step has tried before.
    assert [[outcome.index for outcome in outcomes] for outcomes in told] == [[0, 1, 2, 3], [4, 5, 6, 7], []]
    assert told[0][:2] == [Outcome(0, (0.0, 0.0), 0.0), Outcome(1, (0.0, 1.0), 0.5)]


class RolloutThatWaitsForRewards(NumberedRollout):
    """Does not finish a group before the rewards of the one before have been computed."""

    def __init__(self, n_judged: threading.Semaphore) -> None:
        super().__init__()
        self._n_judged = n_judged

    def generate(
        self,
        prompts: Sequence[Prompt],
        n_samples: int,
        sampling: SamplingParams,
        key: tuple[int | str, ...],
        finished: Finished = ignore,
        renew: Callable[[], None] | None = None,
    ) -> Generated:
        def wait_for_rewards(groups: list[Group]) -> None:
            finished(groups)
            for _ in range(n_samples):
                assert self._n_judged.acquire(timeout=20), "the rewards of a group wait for other groups"

        return super().generate(prompts, n_samples, sampling, key, wait_for_rewards)


def test_a_group_has_its_rewards_before_others_are_generated() -> None:
    n_judged, threads = threading.Semaphore(0), set()

    def counted(response: str, ground_truth: Any, **_: Any) -> float:
        threads.add(threading.current_thread())
        n_judged.release()
        return float(response)

    steps, _ = source(set(), 8)
    rewards = RewardSet.of(NamedReward("counted", counted, None))
    steps = replace(steps, rollout=RolloutThatWaitsForRewards(n_judged), rewards=rewards)
    taken = steps.take(1)
    assert [sample.reward for sample in taken.samples] == [0.0, 1.0] * BATCH
    # Time limits of functions, ours and their own, are signals.
    assert threads == {threading.main_thread()}


def test_the_phase_of_the_rewards_is_the_time_by_which_they_outlast_generation() -> None:
    """Groups finish at once; the first ones' rewards are computed before generation ends, the last ones' behind it."""
    may_end, outlasts, n_judged, end = threading.Event(), threading.Event(), 0, 0.0

    class SlowRollout(NumberedRollout):
        def generate(self, *args: Any, **kwargs: Any) -> Generated:
            result = super().generate(*args, **kwargs)
            assert may_end.wait(60)
            nonlocal end
            end = time.perf_counter()
            return result

    def slow(response: str, ground_truth: Any, **_: Any) -> float:
        nonlocal n_judged
        n_judged += 1
        if n_judged == 7:
            may_end.set()
            assert outlasts.wait(60)
        time.sleep(0.05)
        return 1.0

    class Timers(PhaseTimers):
        def _change(self) -> None:
            super()._change()
            if "rewards" in self.under_way:
                outlasts.set()

    steps, _ = source(set(), 8)
    rewards = RewardSet.of(NamedReward("slow", slow, None))
    steps = replace(steps, rollout=SlowRollout(), rewards=rewards, timers=Timers())
    start = time.perf_counter()
    steps.take(1)
    after, seconds = time.perf_counter() - end, steps.timers.take()
    assert 6 * 0.05 <= seconds["rollout"] <= time.perf_counter() - start
    assert 2 * 0.05 <= seconds["rewards"] <= after


def test_failures_of_rewards_and_of_generation_end_both() -> None:
    waits, stops = threading.Event(), threading.Event()

    class EndlessRollout(NumberedRollout):
        def generate(
            self, prompts: Any, n_samples: int, sampling: Any, key: Any, finished: Finished = ignore, renew: Any = None
        ) -> Any:
            super().generate(prompts, n_samples, sampling, key, finished)
            try:
                while not waits.wait(0.01):
                    finished([])
            finally:
                stops.set()

    class BrokenRollout(NumberedRollout):
        def generate(self, *args: Any, **kwargs: Any) -> Generated:
            super().generate(*args, **kwargs)
            raise OSError("the replica is gone")

    def failing(response: str, ground_truth: Any, **_: Any) -> float:
        raise ZeroDivisionError

    steps, _ = source(set(), 8)
    broken = RewardSet.of(NamedReward("failing", failing, None))
    with pytest.raises(ValueError, match=r"(?s)the reward function 'failing' failed on prompt 4 .*ZeroDivisionError"):
        replace(steps, rollout=EndlessRollout(), rewards=broken).take(1)
    assert stops.is_set()
    with pytest.raises(OSError, match="the replica is gone"):
        replace(steps, rollout=BrokenRollout()).take(1)
    assert not [thread for thread in threading.enumerate() if thread.name == "rollout"]


def test_remax_has_a_greedy_completion_of_each_prompt() -> None:
    steps, rollout = source({0, 1}, 8, "actor.advantage=remax")
    taken = steps.take(1)
    assert [(asked, n, greedy) for asked, n, greedy, _ in rollout.asked] == [
        ([0, 1, 2, 3], SAMPLES, False),
        ([0, 1, 2, 3], 1, True),
    ]
    assert [sample.prompt.index for sample in taken.greedy] == [0, 1, 2, 3]
    assert len(taken.samples) == len(taken.batch) == BATCH * SAMPLES
    plain, _ = source(set(), 8)
    assert plain.take(1).greedy == ()
