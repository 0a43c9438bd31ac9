"""Steps of a synchronous run: dynamic sampling, its bound and its position, greedy baselines, rewards meanwhile."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from fivefold.batch import Columns
from fivefold.data.sampler import EpochSampler, Outcome
from fivefold.experience.source import Source
from fivefold.observe.timers import PhaseTimers
from fivefold.rewards.reward import NamedReward
from fivefold.rewards.reward_set import RewardSet, WeightedReward
from fivefold.roles.responses import Job, Responses
from fivefold.roles.rollout_worker import RolloutWorker
from fivefold.types import Completion, Episode, Prompt
from tests.unit.experience.local_replicas import LocalGroup, LocalRollout
from tests.unit.experience.streams import BATCH, SAMPLES, Parts, recipe_of


class NumberedWorker(RolloutWorker):
    """Answers each prompt with the number of the sample; a sequence's length is its prompt's index and that number.

    The groups of a round end one by one, the last one first.
    """

    def __init__(self) -> None:
        self.rounds: list[list[Job]] = []
        """The jobs of each round."""
        self._waiting: list[Job] = []

    @property
    def asked(self) -> list[tuple[list[int], int, bool]]:
        """Indices of the prompts of each round, completions of each, and whether they are greedy."""
        return [
            ([job.prompt.index for job in jobs], len(jobs[0].requests), jobs[0].sampling.greedy) for jobs in self.rounds
        ]

    def advance(self, jobs: Sequence[Job], seconds: float) -> tuple[Responses, Columns | None]:
        if jobs:
            self.rounds.append(list(jobs))
            self._waiting += jobs
        job = self._waiting.pop()
        done = [self._trajectory(job, job.first + number) for number in range(len(job.requests))]
        texts = [str(job.first + number) for number in range(len(job.requests))]
        report = Responses.of([job.number], done, texts, 0.001)
        n_running = sum(len(job.requests) for job in self._waiting)
        return replace(report, n_running=n_running), Columns.of(done)

    def _trajectory(self, job: Job, number: int) -> Episode:
        prompt = replace(job.prompt, token_ids=(1,) * max(1, 10 * job.prompt.index + number - 1))
        return Episode.single_turn(prompt, Completion.of([5], [-1.0], "stop", 0))


def judge(response: str, ground_truth: Any, **_: Any) -> float:
    """Reward the second sample, where the prompt has a signal."""
    return float(response == "1" and ground_truth)


@contextmanager
def steps_of(
    with_signal: set[int],
    n_prompts: int,
    *overrides: str,
    corrects: Callable[[], bool] = lambda: False,
    rewards: RewardSet | None = None,
    worker: RolloutWorker | None = None,
    timers: PhaseTimers | None = None,
    position: Any = None,
    first_step: int = 1,
) -> Iterator[tuple[Source, Any]]:
    recipe = recipe_of(*overrides)
    prompts = [Prompt(i, "?", (1,), i in with_signal) for i in range(n_prompts)]
    sampler = EpochSampler(prompts, batch_size=BATCH, shuffle=False, seed=1)
    if position is not None:
        sampler.load_state_dict(position)
    worker, rewards = worker or NumberedWorker(), rewards or RewardSet.of(NamedReward("judge", judge, None))
    parts = Parts(recipe, sampler, LocalRollout(LocalGroup([worker])), rewards, timers or PhaseTimers())
    with parts.source(first_step=first_step, corrects=corrects) as source:
        yield source, worker


def test_prompts_without_signal_are_replaced_by_further_ones() -> None:
    with steps_of({1, 4, 6, 9, 10, 11}, 40, "actor.dynamic_sampling=true") as (steps, rollout):
        taken = steps.take(1)
        assert list(dict.fromkeys(taken.groups)) == [1, 4, 6, 9]
        assert taken.groups == [1, 1, 4, 4, 6, 6, 9, 9]
        # The batch has the same sequences as the samples.
        assert taken.batch.lengths_N.tolist() == [sample.n_tokens for sample in taken.samples] == [
            10, 11, 40, 41, 60, 61, 90, 91,
        ]  # fmt: skip
        assert taken.metrics["dynamic_sampling/rounds"] == 3
        assert taken.metrics["dynamic_sampling/kept"] == 6 / 12
        seeds = [request.seed for jobs in rollout.rounds for job in jobs for request in job.requests]
        assert len(set(seeds)) == len(seeds), "each round has its own random choices"
        # A run that continues from a checkpoint reads what this run would read next.
        position = steps.sampler_state
        steps.take(2)
    words = ("actor.dynamic_sampling=true",)
    with steps_of({1, 4, 6, 9, 10, 11}, 40, *words, position=position, first_step=2) as (again, later):
        again.take(2)
    assert [[job.requests for job in jobs] for jobs in later.rounds] == [
        [job.requests for job in jobs] for jobs in rollout.rounds[3:]
    ]
    assert later.asked[0][0] == [12, 13, 14, 15]


def test_all_log_probs_are_asked_for_once_the_loss_is_corrected() -> None:
    answers = iter([False, True])
    with steps_of(set(), 40, corrects=lambda: next(answers)) as (steps, rollout):
        steps.take(1)
        steps.take(2)
    wanted = [[request.wants_logprobs for job in jobs for request in job.requests] for jobs in rollout.rounds]
    assert sum(wanted[0]) == SAMPLES, "those of one prompt, of an eighth"
    assert all(wanted[1])


def test_prompts_without_signal_fill_a_step_after_the_last_round() -> None:
    with steps_of({5}, 40, "actor.dynamic_sampling=true", "actor.dynamic_sampling_max_rounds=2") as (steps, rollout):
        taken = steps.take(1)
    assert len(rollout.asked) == 2
    assert sorted(set(taken.groups)) == [0, 1, 2, 5]
    assert len(taken.samples) == BATCH * SAMPLES


def test_rewards_that_differ_one_by_one_are_a_signal_for_gdpo_though_their_sums_are_equal() -> None:
    def mirrored(response: str, ground_truth: Any, **_: Any) -> float:
        return -judge(response, ground_truth)

    both = RewardSet(tuple(WeightedReward(NamedReward(each.__name__, each, None)) for each in (judge, mirrored)))
    for algorithm, found in {"grpo": [0, 1, 2, 3], "gdpo": [1, 4, 6, 9]}.items():
        words = ("actor.dynamic_sampling=true", f"algorithm={algorithm}")
        with steps_of({1, 4, 6, 9}, 40, *words, rewards=both) as (steps, _):
            assert list(dict.fromkeys(steps.take(1).groups)) == found
    # A reward of weight 0 is measured, and teaches nothing.
    measured = RewardSet(tuple(replace(each, weight=0.0) for each in both.rewards))
    words = ("actor.dynamic_sampling=true", "algorithm=gdpo")
    with steps_of({1, 4, 6, 9}, 40, *words, rewards=measured) as (steps, _):
        assert list(dict.fromkeys(steps.take(1).groups)) == [0, 1, 2, 3]


def test_sums_that_differ_by_rounding_are_no_signal() -> None:
    assert (0.1 + 0.2) + 0.3 != (0.3 + 0.2) + 0.1

    def part(values: str) -> Callable[..., float]:
        def reward(response: str, ground_truth: Any, **_: Any) -> float:
            return float(values[int(response) if ground_truth else 0]) / 10

        return reward

    parts = RewardSet(tuple(WeightedReward(NamedReward(values, part(values), None)) for values in ("13", "22", "31")))
    with steps_of({1, 4, 6, 9}, 40, "actor.dynamic_sampling=true", rewards=parts) as (steps, _):
        taken = steps.take(1)
    # From Python 3.12 on, `sum` makes up for the rounding by itself.
    n_sums = 2 if sys.version_info < (3, 12) else 1
    assert len({sample.reward for sample in taken.samples if sample.prompt.index == 1}) == n_sums
    assert taken.metrics["dynamic_sampling/kept"] == 0


def test_rewards_that_the_clip_makes_equal_are_no_signal() -> None:
    for clip, kept in ((5.5, 4 / 12), (5.0, 0.0)):
        words = (
            *("actor.dynamic_sampling=true", "actor.reward_bias=5", f"actor.reward_clip={clip}"),
            *("actor.overlong_reward_penalty=true", "actor.length_penalty=1"),
        )
        with steps_of({1, 4, 6, 9}, 40, *words) as (steps, _):
            assert steps.take(1).metrics["dynamic_sampling/kept"] == kept


def test_a_step_has_no_prompt_twice_though_it_reads_on_into_the_next_epoch() -> None:
    words = ("actor.dynamic_sampling=true", "actor.dynamic_sampling_max_rounds=9")
    with steps_of({2}, 8, *words) as (steps, rollout):
        taken = steps.take(1)
    assert len(set(taken.groups)) == BATCH
    assert all(taken.groups.count(group) == SAMPLES for group in taken.groups)
    assert [asked for asked, *_ in rollout.asked] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_samplers_are_told_what_each_prompt_earned_in_every_round() -> None:
    words = ("actor.dynamic_sampling=true", "actor.dynamic_sampling_max_rounds=9")
    told: list[Sequence[Outcome]] = []
    with steps_of({1, 4, 6}, 8, *words) as (steps, _):
        steps._sampler.told = told.append  # type: ignore[method-assign]
        steps.take(1)
    # The third batch begins the next epoch, whose prompts the step has tried before.
    assert [[outcome.index for outcome in outcomes] for outcomes in told] == [[0, 1, 2, 3], [4, 5, 6, 7], []]
    assert told[0][:2] == [Outcome(0, (0.0, 0.0), 0.0), Outcome(1, (0.0, 1.0), 0.5)]


class WorkerThatWaitsForRewards(NumberedWorker):
    """Does not finish a group before the rewards of the one before have been computed."""

    def __init__(self, n_judged: threading.Semaphore) -> None:
        super().__init__()
        self._n_judged = n_judged
        self._is_first = True

    def advance(self, jobs: Sequence[Job], seconds: float) -> tuple[Responses, Columns | None]:
        if not self._is_first:
            for _ in range(SAMPLES):
                assert self._n_judged.acquire(timeout=20), "the rewards of a group wait for other groups"
        self._is_first = False
        return super().advance(jobs, seconds)


def test_a_group_has_its_rewards_before_others_are_generated() -> None:
    n_judged, threads = threading.Semaphore(0), set()

    def counted(response: str, ground_truth: Any, **_: Any) -> float:
        threads.add(threading.current_thread())
        n_judged.release()
        return float(response)

    rewards, worker = RewardSet.of(NamedReward("counted", counted, None)), WorkerThatWaitsForRewards(n_judged)
    with steps_of(set(), 8, rewards=rewards, worker=worker) as (steps, _):
        taken = steps.take(1)
    assert [sample.reward for sample in taken.samples] == [0.0, 1.0] * BATCH
    # Time limits of functions, ours and their own, are signals.
    assert threads == {threading.main_thread()}


def test_the_phase_of_the_rewards_is_the_time_by_which_they_outlast_generation() -> None:
    """The last group ends while the rewards of those before it are computed; its own come after generation."""
    may_end, outlasts, n_judged, end = threading.Event(), threading.Event(), 0, 0.0

    class SlowWorker(NumberedWorker):
        def advance(self, jobs: Sequence[Job], seconds: float) -> tuple[Responses, Columns | None]:
            result = super().advance(jobs, seconds)
            if not self._waiting:
                assert may_end.wait(60)
                nonlocal end
                end = time.perf_counter()
            return result

    def slow(response: str, ground_truth: Any, **_: Any) -> float:
        nonlocal n_judged
        n_judged += 1
        if n_judged == 5:
            may_end.set()
            assert outlasts.wait(60)
        time.sleep(0.05)
        return 1.0

    class Timers(PhaseTimers):
        def _change(self) -> None:
            super()._change()
            if "rewards" in self.under_way:
                outlasts.set()

    timers = Timers()
    rewards = RewardSet.of(NamedReward("slow", slow, None))
    with steps_of(set(), 8, rewards=rewards, worker=SlowWorker(), timers=timers) as (steps, _):
        start = time.perf_counter()
        steps.take(1)
        after, seconds = time.perf_counter() - end, timers.take()
    assert 4 * 0.05 <= seconds["rollout"] <= time.perf_counter() - start
    assert 4 * 0.05 <= seconds["rewards"] <= after


def test_failures_of_rewards_and_of_generation_end_both() -> None:
    class EndlessWorker(NumberedWorker):
        """Finishes one group."""

        def advance(self, jobs: Sequence[Job], seconds: float) -> tuple[Responses, Columns | None]:
            if jobs:
                return super().advance(jobs, seconds)
            time.sleep(0.01)
            return replace(Responses.of([], [], []), n_running=1), None

    class BrokenWorker(NumberedWorker):
        def advance(self, jobs: Sequence[Job], seconds: float) -> tuple[Responses, Columns | None]:
            if not jobs:
                raise OSError("the replica is gone")
            return super().advance(jobs, seconds)

    def failing(response: str, ground_truth: Any, **_: Any) -> float:
        raise ZeroDivisionError

    broken = RewardSet.of(NamedReward("failing", failing, None))
    with (
        steps_of(set(), 8, rewards=broken, worker=EndlessWorker()) as (steps, _),
        pytest.raises(ValueError, match=r"(?s)the reward function 'failing' failed on prompt 4 .*ZeroDivisionError"),
    ):
        steps.take(1)
    with steps_of(set(), 8, worker=BrokenWorker()) as (steps, _), pytest.raises(OSError, match="the replica is gone"):
        steps.take(1)
    assert not [thread for thread in threading.enumerate() if thread.name == "rollout"]


def test_remax_has_a_greedy_completion_of_each_prompt() -> None:
    with steps_of({0, 1}, 8, "actor.advantage=remax") as (steps, rollout):
        taken = steps.take(1)
    assert rollout.asked == [([0, 1, 2, 3], SAMPLES, False), ([0, 1, 2, 3], 1, True)]
    assert [sample.prompt.index for sample in taken.greedy] == [0, 1, 2, 3]
    assert len(taken.samples) == len(taken.batch) == BATCH * SAMPLES
    with steps_of(set(), 8) as (plain, _):
        assert plain.take(1).greedy == ()
