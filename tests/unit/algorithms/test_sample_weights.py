"""Weights of whole samples, against their formulas in plain Python."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fivefold.algorithms.metrics import effective_share
from fivefold.algorithms.sample_weights import SampleWeights
from fivefold.config.schema.roles import ActorConfig, SampleWeightsConfig
from fivefold.types import Prompt

BY_REWARD: dict[str, Callable[[float, list[float]], float]] = {
    "power": lambda r, every: (r * r) ** 0.75,
    "max_min": lambda r, every: 1.0 if r in (max(every), min(every)) else 0.0,
    "max_random": lambda r, every: 0.4 if r == max(every) else 0.1,
}
"""The weight of a reward among those of a step; the exponent of `power` is 1.5."""


def prompts_of(difficulties: list[Any]) -> list[Prompt]:
    return [Prompt(i, "?", (1,), "", extra_info={"hard": value}) for i, value in enumerate(difficulties)]


def test_weights_are_their_formulas_with_mean_one() -> None:
    rng = random.Random(7)
    for _ in range(200):
        n = rng.randint(1, 9)
        rewards, lengths = [rng.choice([-1.0, 0.0, 0.3, 2.0]) for _ in range(n)], [rng.randint(1, 30) for _ in range(n)]
        difficulties = [rng.random() for _ in range(n)]
        rule = rng.choice([None, "power", "max_min", "max_random"])
        by_difficulty, by_length = rng.random() < 0.5, rng.random() < 0.5
        config = SampleWeightsConfig.model_validate(
            {"reward": rule, "difficulty_key": "hard" if by_difficulty else None, "length": by_length}
            | ({"reward_power": 1.5} if rule == "power" else {})
        )
        weights = SampleWeights.of(ActorConfig(path="m", sample_weights=config))
        wanted = [1.0] * n
        for i in range(n):
            if rule is not None:
                wanted[i] *= BY_REWARD[rule](rewards[i], rewards) + 1e-8
            if by_difficulty:
                wanted[i] *= 0.5 + 1.5 * difficulties[i]
            if by_length and max(lengths) > min(lengths):
                wanted[i] *= 1.5 - (lengths[i] - min(lengths)) / (max(lengths) - min(lengths))
        if weights is None:
            assert (rule, by_difficulty, by_length) == (None, False, False)
            continue
        got = weights(torch.tensor(rewards, dtype=torch.float64), prompts_of(difficulties), torch.tensor(lengths))
        assert got.tolist() == pytest.approx([w * n / sum(wanted) for w in wanted], rel=1e-9)
        share = sum(wanted) ** 2 / sum(w * w for w in wanted) / n
        assert effective_share(float(got.mean()), float((got**2).mean())) == pytest.approx(share)


def test_filtration_has_the_mean_gradient_of_drawing_with_replacement() -> None:
    """N draws in proportion to the weights take sample i N w_i / sum w times in the mean."""
    rewards_N = torch.tensor([0.5, -1.0, 0.0, 2.0], dtype=torch.float64)
    got_N = SampleWeights("power", 2.0)(rewards_N, prompts_of([None] * 4), torch.ones(4, dtype=torch.int64))
    draws = torch.multinomial(rewards_N**2, 100_000, replacement=True, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(got_N, 4 * draws.bincount(minlength=4) / 100_000, atol=0.02, rtol=0.0, check_dtype=False)


@pytest.mark.parametrize("value", [None, "0.5", 1.5])
def test_a_prompt_without_a_difficulty_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"difficulty_key=hard: prompt 2 \('\?'\) has .*, which is no number from 0"):
        SampleWeights(difficulty_key="hard").difficulties(prompts_of([0.5, value]))
