"""Where a step's samples come from: dynamic sampling, its bound and its position, and greedy baselines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fivefold.config.load import load_recipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.data.sampler import EpochSampler, Outcome
from fivefold.experience.step import StepSource
from fivefold.observe.timers import PhaseTimers
from fivefold.rewards.reward import NamedReward
from fivefold.rewards.reward_set import RewardSet
from fivefold.roles.remote_batch import RemoteBatch
from fivefold.roles.rollout import Generated, Rollout
from fivefold.rollout.protocol import SamplingParams
from fivefold.types import Prompt, Sample

QUICKSTART = Path(__file__).resolve().parents[3] / "recipes" / "quickstart.yaml"
BATCH, SAMPLES = 4, 2


class NumberedRollout(Rollout):
    """Answers each prompt with the number of the sample; a sequence's length is its prompt's index and that number."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], int, bool, tuple[Any, ...]]] = []

    def generate(
        self, prompts: Sequence[Prompt], n_samples: int, sampling: SamplingParams, key: tuple[int | str, ...]
    ) -> Generated:
        self.asked.append(([prompt.index for prompt in prompts], n_samples, sampling.greedy, key))
        pairs = [(prompt, number) for prompt in prompts for number in range(n_samples)]
        samples = [Sample(p, str(number), "stop", 10 * p.index + number, 1, (0, 0)) for p, number in pairs]
        lengths = np.array([sample.n_tokens for sample in samples])
        return Generated(samples, RemoteBatch(lengths, np.ones(len(samples), np.int64), ()), {"replica_busy/min": 1.0})


def judge(response: str, ground_truth: Any, **_: Any) -> float:
    """Reward the second sample, where the prompt has a signal."""
    return float(response == "1" and ground_truth)


def source(with_signal: set[int], n_prompts: int, *overrides: str) -> tuple[StepSource, NumberedRollout]:
    words = ["actor.ppo_n_minibatches=1", f"train_dataset.batch_size={BATCH}", f"gconfig.n_samples={SAMPLES}"]
    recipe = load_recipe(QUICKSTART, [*words, *overrides], TrainRecipe)
    prompts = [Prompt(i, "?", (1,), i in with_signal) for i in range(n_prompts)]
    sampler = EpochSampler(prompts, batch_size=BATCH, shuffle=False, seed=1)
    rollout = NumberedRollout()
    sampling = SamplingParams.for_training(recipe.gconfig, recipe.rollout)
    rewards = RewardSet.of(NamedReward("judge", judge, None))
    return StepSource(recipe, sampler, rollout, sampling, rewards, PhaseTimers()), rollout


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


def test_prompts_without_signal_fill_a_step_after_the_last_round() -> None:
    steps, rollout = source({5}, 40, "actor.dynamic_sampling=true", "actor.dynamic_sampling_max_rounds=2")
    taken = steps.take(1)
    assert len(rollout.asked) == 2
    assert sorted(set(taken.groups)) == [0, 1, 2, 5]
    assert len(taken.samples) == BATCH * SAMPLES


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
