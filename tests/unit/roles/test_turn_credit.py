"""The turns of episodes become columns of their tokens, by the recipe's credit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from fivefold.algorithms.advantages.compute import Scores
from fivefold.algorithms.reward_shaping import RewardShaping
from fivefold.algorithms.state import AlgorithmState
from fivefold.algorithms.turn_gae import TURN, TURN_REWARDS
from fivefold.config.load import load_recipe
from fivefold.config.problems import RecipeError
from fivefold.config.schema.train import TrainRecipe
from fivefold.families.read import find_shape
from fivefold.observe.timers import PhaseTimers
from fivefold.roles.devices import Models
from fivefold.roles.remote_batch import RemoteBatch, read_columns
from fivefold.types import Move, Prompt, Sample
from fivefold.update.compose import policy_update
from fivefold.update.step import Prepared, Skips, UpdateState
from fivefold.update.turn_credit import TurnRewards, move_rewards
from tests.unit.roles.test_policy_update import ONE_UPDATE, QUICKSTART, RecordingActor

GAME = ("environment.game=fivefold.environments.guess_digit:GuessDigit", "reward.fn=environment", "reward.kwargs={}")
LENGTHS = np.array([6, 7])


def samples() -> list[Sample]:
    """Return a group of two episodes: of two moves, tokens 1, 2 and 4; and of three, tokens 1, 3, 4 and 6."""
    prompt = Prompt(0, "?", (1,), "")
    first = [Move(1, 2, {"g": 0.5}, "s"), Move(4, 1, {"g": 1.0}, "a")]
    second = [Move(1, 1, {"g": 0.0}, "s"), Move(3, 2, {}, "s"), Move(6, 1, {"g": 2.0}, "b")]
    return [
        Sample(prompt, "", "done", 6, 3, (0, 0), {"g": 1.5}, moves=first),
        Sample(prompt, "", "done", 7, 4, (0, 0), {"g": 2.0, "judge": 1.0}, {"g": 1.0, "judge": 3.0}, moves=second),
    ]


def columns(*keys: str) -> dict[str, npt.NDArray[Any]]:
    recipe = load_recipe(QUICKSTART, [ONE_UPDATE, *GAME, *keys], TrainRecipe)
    update = policy_update(recipe, Models(RecordingActor()), PhaseTimers(), find_shape("package:tiny-moe"))
    state = UpdateState(AlgorithmState.of(recipe.actor), {"actor": Skips()})
    batch = RemoteBatch(LENGTHS, np.array([3, 4]), ())
    return of_tokens(update.prepare(1, samples(), batch, (), state).batch)


def of_tokens(batch: RemoteBatch) -> dict[str, npt.NDArray[Any]]:
    """Return the columns of all tokens."""
    rows = read_columns(batch, len(batch))
    return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}


def test_rewards_of_moves_add_up_to_the_shaped_reward() -> None:
    assert move_rewards(samples(), None) == [[0.5, 1.0], [0.0, 0.0, 5.0]]
    shaping = RewardShaping(limit=8, bias=0.25, scaling=2.0, clip=6.0)
    assert move_rewards(samples(), shaping) == [[1.0, 2.5], [0.0, 0.0, 6.0]]


def test_credit_by_turn() -> None:
    keys = ("actor.advantage=rloo", "actor.credit=turn", "actor.turn_discount=0.5")
    advantages = columns(*keys)["advantages"]
    # earned from each move on: 0.5 + 0.5 = 1, 1 and 0.25 * 5 = 1.25, 2.5, 5; the third turn of one episode is alone
    whole = 5.0 - 1.5
    assert advantages.tolist() == [0, -0.25, -0.25, 0, -1.5, 0, 0, 0.25, 0, 1.5, 1.5, 0, whole]


def test_credit_by_state() -> None:
    keys = ("algorithm=gigpo", "actor.advantage=rloo", "actor.turn_discount=1.0", "actor.state_weight=2.0")
    advantages = columns(*keys)["advantages"]
    # in state s: 1.5 of the first episode, 5 and 5 of the second; the others are alone in theirs
    low, high = -3.5 + 2 * (1.5 - 5), 3.5 + 2 * (5 - 3.25)
    assert advantages.tolist() == [0, low, low, 0, -3.5, 0, 0, high, 0, high, high, 0, 3.5]


def test_the_critic_learns_where_turns_are() -> None:
    state = UpdateState(AlgorithmState(0.0), {})
    step = Prepared(1, samples(), RemoteBatch(LENGTHS, np.array([3, 4]), ()), state, np.zeros(2, np.float32))
    found = of_tokens(TurnRewards(None).prepare(step).batch)
    sampled = [1, 2, 4, 7, 9, 10, 12]
    assert found[TURN][sampled].tolist() == [0, 0, 1, 0, 1, 1, 2]
    assert found[TURN_REWARDS].tolist() == [0, 0, 0.5, 0, 1.0, 0, 0, 0, 0, 0, 0, 0, 5.0]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["actor.credit=turn"], "set environment|environment.game"),
        ([*GAME, "actor.credit=turn", "actor.advantage=optimal_token_baseline"], "is for advantages of whole"),
        ([*GAME, "actor.credit=state", "actor.advantage=gae", "critic.path=m"], "compares moves without a critic"),
        ([*GAME, "actor.turn_discount=0.5"], "turn_discount=0.5 has no effect"),
        ([*GAME, "actor.credit=turn", "actor.state_weight=0.5"], "state_weight=0.5 has no effect"),
        (
            [*GAME, "actor.credit=turn", "actor.advantage=gae", "critic.path=m", "actor.discount=0.9"],
            "set actor.turn_discount",
        ),
    ],
)
def test_credit_that_cannot_be_is_refused(keys: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe(Path(QUICKSTART), keys, TrainRecipe)


def test_a_method_of_a_user_sees_the_moves_of_a_set() -> None:
    keys = (f"actor.advantage={__name__}:number_of_the_set", "actor.credit=turn")
    advantages = columns(*keys)["advantages"]
    assert advantages.tolist() == [0, 2, 2, 0, 2, 0, 0, 2, 0, 2, 2, 0, 1]


def number_of_the_set(scores: Scores) -> torch.Tensor:
    """Return the size of each set."""
    return scores.of_group.count_N
