"""Several rewards of one recipe: their sum, their data sources, their columns and metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fivefold.config.load import load_recipe
from fivefold.config.schema.rewards import RewardConfig
from fivefold.config.schema.train import TrainRecipe
from fivefold.experience.samples import accuracy, as_record, model_scores, reward_metrics, rewarded
from fivefold.experience.samples import judged as by_functions
from fivefold.rewards.resolve import resolve_rewards
from fivefold.rewards.reward_set import RewardSet
from fivefold.rewards.static_check import reward_problems
from fivefold.roles.remote_batch import RemoteBatch
from fivefold.roles.reward_model import RewardModel
from fivefold.types import Prompt, Sample
from tests.unit.rewards.conftest import Write

QUICKSTART = Path(__file__).resolve().parents[3] / "recipes" / "quickstart.yaml"
MODULE = """\
def right(response, ground_truth, **_): return float(response == ground_truth)
def length(response, ground_truth, **_): return len(response)
async def late(response, ground_truth, **_): return 0.5
"""


@pytest.fixture(autouse=True)
def module(write_module: Write) -> None:
    write_module("several.py", MODULE)


def several(accuracy_of: str | None = None, **rewards: dict[str, Any]) -> RewardSet:
    config = RewardConfig.model_validate({"rewards": rewards, "accuracy_of": accuracy_of})
    return resolve_rewards(config)


def sample(response: str, source: str = "", truth: str = "ab", index: int = 0) -> Sample:
    return Sample(Prompt(index, "q", (1,), truth, source), response, "stop", 2, 1, (0, 0))


class FixedScores(RewardModel):
    """Scores a sequence by its length."""

    def __init__(self) -> None: ...

    def scores(self, batch: RemoteBatch) -> npt.NDArray[np.float64]:
        return batch.lengths_N / 4


def judged(samples: list[Sample], rewards: RewardSet, model: RewardModel | None = None) -> list[Sample]:
    lengths_N = np.array([len(sample.response_text) for sample in samples])
    batch = RemoteBatch(lengths_N, lengths_N, ())
    scores = {} if model is None else model_scores(samples, batch, rewards, model)
    return rewarded(samples, by_functions([[sample] for sample in samples], rewards), rewards, scores)


SUMS: dict[str, dict[str, Any]] = {
    "right": {"fn": "several:right", "data_sources": ["sums"]},
    "length": {"fn": "several:length", "weight": -0.25},
    "late": {"fn": "several:late", "weight": 2.0, "data_sources": ["texts"]},
}


def test_the_weighted_sum_of_the_rewards_that_are_for_a_prompt_is_trained() -> None:
    rewards = several(**SUMS)
    first, second, third = judged([sample("ab", "sums"), sample("abc", "sums"), sample("x", "texts")], rewards)
    assert (first.rewards, first.reward) == ({"right": 1.0, "length": 2.0}, 0.5)
    assert (second.rewards, second.reward) == ({"right": 0.0, "length": 3.0}, -0.75)
    assert (third.rewards, third.reward) == ({"length": 1.0, "late": 0.5}, 0.75)
    # A reward that no sample of a step is for is not asked.
    assert judged([sample("ab", "sums")], rewards)[0].reward == 0.5


def test_the_score_of_a_model_is_a_reward_like_the_others() -> None:
    rewards = resolve_rewards(
        RewardConfig.model_validate(
            {
                "model": {"path": "somewhere"},
                "rewards": {
                    "right": {"fn": "several:right"},
                    "liked": {"fn": "model", "weight": -2.0, "data_sources": ["texts"]},
                },
            }
        )
    )
    samples = [sample("ab", "sums"), sample("abc", "texts"), sample("x", "texts")]
    first, second, third = judged(samples, rewards, FixedScores())
    assert (first.rewards, first.reward) == ({"right": 1.0}, 1.0)
    assert (second.rewards, second.reward) == ({"right": 0.0, "liked": 0.75}, -1.5)
    assert (third.rewards, third.reward) == ({"right": 0.0, "liked": 0.25}, -0.5)


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"fn": "model"}, "fn=model is the score of a reward model, and reward.model names none"),
        ({"model": {"path": "m"}}, "the section model has no effect: set fn=model"),
        ({"fn": "model", "model": {"path": "m"}, "kwargs": {"a": 1}}, "a reward model has no keyword arguments"),
        (
            {"fn": "model", "model": {"path": "m", "megatron": {"recompute": "full"}}},
            "megatron.recompute has no effect on a model that is not trained",
        ),
    ],
)
def test_a_reward_model_that_nothing_uses_or_that_is_missing_is_refused(values: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        RewardConfig.model_validate(values)


def test_a_completion_counts_as_right_by_one_reward() -> None:
    samples = [sample("ab", "sums"), sample("b", "sums"), sample("xy", "texts"), sample("", "texts")]
    # The first reward for sums is `right`, for texts it is `length`.
    assert accuracy(judged(samples, several(**SUMS))) == 2 / 4
    assert accuracy(judged(samples, several("length", **SUMS))) == 3 / 4
    # Where the named reward is not for the prompt, the first one counts.
    assert accuracy(judged(samples, several("late", **SUMS))) == 1 / 4


def test_each_of_several_rewards_is_a_column_and_a_curve() -> None:
    rewards = several(**SUMS)
    samples = judged([sample("ab", "sums"), sample("abc", "sums"), sample("x", "texts")], rewards)
    record = as_record(samples[0], step=3)
    assert {name: record[name] for name in record if name.startswith("reward")} == {
        "reward": 0.5,
        "reward/right": 1.0,
        "reward/length": 2.0,
    }
    metrics = reward_metrics(samples, rewards, by_source=True)
    assert metrics["reward/right/mean"] == 0.5
    assert metrics["reward/right/std"] == 0.5
    assert (metrics["reward/length/min"], metrics["reward/length/max"]) == (1.0, 3.0)
    assert metrics["reward/source/sums/mean"] == pytest.approx((0.5 - 0.75) / 2)
    assert metrics["reward/source/texts/mean"] == 0.75
    assert "reward/late/mean" not in reward_metrics(samples[:2], rewards, by_source=False)


def test_one_reward_has_neither_columns_nor_curves_of_its_own() -> None:
    rewards = resolve_rewards(RewardConfig(fn="several:right"))
    samples = judged([sample("ab")], rewards)
    assert (samples[0].rewards, samples[0].reward, accuracy(samples)) == ({"several:right": 1.0}, 1.0, 1.0)
    assert [name for name in as_record(samples[0]) if name.startswith("reward")] == ["reward"]
    assert reward_metrics(samples, rewards, by_source=False) == {}


def test_prompts_that_no_reward_is_for_are_refused_with_their_number() -> None:
    rewards = several(right={"fn": "several:right", "data_sources": ["sums"]})
    prompts = [sample("", source).prompt for source in ("sums", "text", "text", "")]
    with pytest.raises(ValueError, match=r"data_source 'text' \(2 prompts\), '' \(1 prompts\).*right: \['sums'\]"):
        rewards.check_prompts(prompts)
    rewards.check_prompts(prompts[:1])


def test_a_data_source_that_no_prompt_has_is_refused() -> None:
    rewards = several(right={"fn": "several:right", "data_sources": ["sums", "smus"]}, all={"fn": "several:length"})
    with pytest.raises(ValueError, match=r"reward.rewards.right.data_sources names \['smus'\].*holds \['sums'\]"):
        rewards.check_sources([sample("", "sums").prompt])


def test_ground_truths_are_checked_by_the_rewards_that_are_for_them() -> None:
    rewards = several(
        match={"fn": "exact_match", "data_sources": ["sums"]}, free={"fn": "several:length", "data_sources": ["texts"]}
    )
    rewards.check_prompts([sample("", "sums").prompt, sample("", "texts", " ").prompt])
    with pytest.raises(ValueError, match="the reward 'match' cannot judge"):
        rewards.check_prompts([sample("", "sums", " ").prompt])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"fn": "exact_match", "rewards": {"a": {}}},
            "fn=exact_match with kwargs={} and rewards=.* exclude each other",
        ),
        ({"rewards": {"a": {}}, "accuracy_of": "b"}, "accuracy_of=b is none of rewards="),
        ({"accuracy_of": "b"}, "accuracy_of=b is none of rewards="),
        ({"rewards": {"source": {}}}, "name of the metrics of data sources"),
        ({"rewards": {"a": {"data_sources": []}}}, "leaves the reward no prompt"),
        ({"rewards": {"a/b": {}}}, "rewards"),
        ({"rewards": {"a": {"wieght": 1.0}}}, "wieght"),
        ({"rewards": {"a": {"weight": float("nan")}}}, "finite"),
    ],
)
def test_rewards_that_contradict_each_other_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RewardConfig.model_validate(config)


def test_a_wrong_key_of_one_of_several_rewards_is_refused_with_its_name() -> None:
    config = RewardConfig.model_validate({"rewards": {"a": {}, "b": {"fn": "exact_match", "kwargs": {"pattern": "("}}}})
    problems = list(reward_problems(config))
    assert len(problems) == 1
    assert problems[0].startswith("reward.rewards.b: kwargs.pattern='(' is not a regular expression")
    with pytest.raises(ValueError, match=r"^reward.rewards.b: kwargs.pattern="):
        resolve_rewards(config)


def test_an_unknown_key_of_one_of_several_rewards_has_a_suggestion() -> None:
    with pytest.raises(ValueError, match=r"reward.rewards.a.wieght=1: .*did you mean reward.rewards.a.weight\?"):
        load_recipe(QUICKSTART, ["reward.kwargs={}", "reward.fn=math", "reward.rewards.a.wieght=1"], TrainRecipe)


def test_a_single_reward_with_a_weight_is_told_without_it() -> None:
    rewards = several(length={"fn": "several:length", "weight": 0.5})
    (only,) = judged([sample("abc")], rewards)
    assert as_record(only)["reward/length"] == 3.0
    assert only.reward == 1.5
    assert reward_metrics([only], rewards, by_source=False)["reward/length/mean"] == 3.0
