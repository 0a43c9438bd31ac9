"""What the critic's half of a step estimates with."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

from fivefold.algorithms.gae import EstimateMoments, Estimates
from fivefold.algorithms.state import AlgorithmState
from fivefold.batch import Batch
from fivefold.config.load import load_recipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.engine.scores import Score
from fivefold.families.read import find_shape
from fivefold.observe.timers import PhaseTimers
from fivefold.roles.actor import Actor
from fivefold.roles.devices import Models
from fivefold.roles.models import TrainedModel, Trainer
from fivefold.roles.remote_batch import RemoteBatch
from fivefold.update.compose import policy_update
from fivefold.update.critic import Critic
from fivefold.update.step import Prepared, UpdateState

PPO = Path(__file__).resolve().parents[3] / "recipes" / "quickstart-ppo.yaml"
VALUES, REWARD = [0.5, 0.25, 0.75], 2.0
"""The values of a completion of three tokens, and its reward."""


class OneCompletion:
    """Processes of a critic that estimate over one completion instead of those of a batch."""

    def score(self, batch: RemoteBatch, what: Score) -> tuple[()]:
        return ()

    def compute(self, batch: RemoteBatch, estimates: Estimates) -> tuple[tuple[()], list[EstimateMoments]]:
        n = len(VALUES)
        fields = {"values": torch.tensor(VALUES), "rewards": torch.full((n,), REWARD)}
        moments, columns = estimates(Batch((n,), torch.zeros(n, dtype=torch.int64), torch.ones(n), fields))
        self.advantages_T, self.returns_T = columns["advantages"], columns["returns"]
        return (), [moments]


def estimates(*keys: str) -> tuple[list[float], list[float], bool]:
    """Return advantages and returns of the completion, and whether the former are whitened."""
    recipe, processes = load_recipe(PPO, list(keys), TrainRecipe), OneCompletion()
    models = Models(object.__new__(Actor), {"critic": TrainedModel(cast(Trainer, processes))})
    parts = policy_update(recipe, models, PhaseTimers(), find_shape("package:tiny-moe")).parts
    [critic] = [part for part in parts if isinstance(part, Critic)]
    batch, state = RemoteBatch(np.array([3]), np.array([3]), ()), UpdateState(AlgorithmState.of(recipe.actor), {})
    prepared = critic.prepare(Prepared(1, [], batch, state, np.array([REWARD], np.float32)))
    return processes.advantages_T.tolist(), processes.returns_T.tolist(), bool(prepared.changes)


def by_formula(gamma: float, lam: float) -> list[float]:
    """A_t = sum_k (gamma lam)^k delta_(t + k)."""
    rewards, after = [0.0, 0.0, REWARD], [*VALUES[1:], 0.0]
    deltas = [r + gamma * next_value - value for r, next_value, value in zip(rewards, after, VALUES, strict=True)]
    return [sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(deltas))]


@pytest.mark.parametrize(
    ("keys", "gamma", "lam"),
    [
        (["actor.discount=0.9", "actor.gae_lambda=1"], 0.9, 1.0),
        (["actor.discount=1", "actor.gae_lambda=0.5"], 1.0, 0.5),
        (["actor.discount=0.9", "actor.gae_lambda=0.5"], 0.9, 0.5),
        # lambda is 1 - 1 / (alpha l), with 3 tokens.
        (["actor.discount=1", "actor.gae_lambda=1", "actor.gae_length_alpha=0.8"], 1.0, 1 - 1 / (0.8 * 3)),
    ],
)
def test_advantages_are_discounted_and_weighted_as_the_recipe_says(keys: list[str], gamma: float, lam: float) -> None:
    advantages, returns, _ = estimates(*keys)
    wanted = by_formula(gamma, lam)
    assert advantages == pytest.approx(wanted)
    assert returns == pytest.approx([a + value for a, value in zip(wanted, VALUES, strict=True)])


def test_the_critic_may_learn_returns_with_another_lambda() -> None:
    advantages, returns, _ = estimates("actor.discount=1", "actor.gae_lambda=0.5", "critic.gae_lambda=1")
    assert advantages == pytest.approx(by_formula(1.0, 0.5))
    assert returns == pytest.approx([REWARD] * 3)


@pytest.mark.parametrize(("value", "whitens"), [("null", True), ("true", True), ("false", False)])
def test_advantages_of_a_critic_are_whitened_unless_the_recipe_says_otherwise(value: str, whitens: bool) -> None:
    assert estimates(f"actor.whiten_advantages={value}")[2] is whitens
