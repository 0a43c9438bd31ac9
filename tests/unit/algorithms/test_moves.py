"""Credit by turn and by state, and GAE by turn, are what plain loops over scalars compute."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from statistics import fmean, stdev

import pytest
import torch

from fivefold.algorithms.advantages.baselines import rloo
from fivefold.algorithms.advantages.compute import Scores
from fivefold.algorithms.advantages.normalised import grpo
from fivefold.algorithms.advantages.plain import rewards as plain_rewards
from fivefold.algorithms.gae import GAE
from fivefold.algorithms.turn_gae import TURN, TURN_REWARDS, TurnGAE
from fivefold.algorithms.turns import Moves, returns
from fivefold.batch import Batch
from fivefold.config.schema.roles import NormConfig

GRPO = partial(grpo, reward_norm=NormConfig())
EPS = NormConfig().eps


def normal(value: float, others: list[float]) -> float:
    """Return a value of a set, normalised by the set's mean and standard deviation."""
    if max(others) == min(others):
        return 0.0
    return (value - fmean(others)) / (stdev(others) + EPS)


def leave_one_out(value: float, others: list[float]) -> float:
    return value - (sum(others) - value) / (len(others) - 1) if len(others) > 1 else 0.0


METHODS: dict[str, tuple[Callable[[Scores], torch.Tensor], Callable[[float, list[float]], float]]] = {
    "grpo": (GRPO, normal),
    "rloo": (rloo, leave_one_out),
}


def test_what_is_earned_from_a_turn_on_is_discounted_by_turns() -> None:
    assert returns([1.0, 0.0, 4.0], 0.5) == [1.0 + 0.25 * 4.0, 2.0, 4.0]
    assert returns([1.0, 2.0], 1.0) == [3.0, 2.0]
    assert returns([], 0.9) == []


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("seed", range(5))
def test_moves_are_compared_within_their_group(name: str, seed: int) -> None:
    draw = random.Random(seed)
    method, plain = METHODS[name]
    episodes = []
    for group in range(3):
        for _ in range(4):
            rewards = [float(draw.randint(0, 3)) for _ in range(draw.randint(1, 5))]
            episodes.append((group, returns(rewards, 0.9), [draw.choice("abc") for _ in rewards]))
    own = torch.tensor([draw.random() for _ in episodes], dtype=torch.float32)
    rows = [(i, group, t) for i, (group, values, _) in enumerate(episodes) for t in range(len(values))]
    moves = Moves(
        torch.tensor([episodes[i][1][t] for i, _, t in rows], dtype=torch.float64),
        torch.tensor([i for i, _, _ in rows]),
        torch.ones(len(rows), dtype=torch.int64),
        [t for _, _, t in rows],
        [episodes[i][2][t] for i, _, t in rows],
        [group for _, group, _ in rows],
    )
    by_turn, by_state = moves.by_turn(method, own, compares=True), moves.by_state(method, own, 0.7)
    sets: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for i, group, t in rows:
        sets[group, t].append(episodes[i][1][t])
        sets[group, episodes[i][2][t]].append(episodes[i][1][t])
    assert 1 in map(len, sets.values()), "some move is alone"
    for place, (i, group, t) in enumerate(rows):
        value, same_turn, same_state = episodes[i][1][t], sets[group, t], sets[group, episodes[i][2][t]]
        wanted = plain(value, same_turn) if len(same_turn) > 1 else float(own[i])
        assert by_turn[place].item() == pytest.approx(wanted, abs=1e-9)
        extra = plain(value, same_state) if len(same_state) > 1 else 0.0
        assert by_state[place].item() == pytest.approx(float(own[i]) + 0.7 * extra, abs=1e-9)


def test_a_method_that_compares_nothing_gives_what_is_earned() -> None:
    values = torch.tensor([2.0, 0.0, 5.0], dtype=torch.float64)
    moves = Moves(values, torch.tensor([0, 0, 1]), torch.ones(3, dtype=torch.int64), [0, 1, 0], ["", "", ""], [0, 0, 1])
    assert moves.by_turn(plain_rewards, torch.tensor([9.0, 9.0]), compares=False).tolist() == values.tolist()


def test_gae_by_turn_is_gae_over_one_step_a_turn() -> None:
    """Row 0 has turns of 2, 1 and 3 tokens with answers between two of them, in another order than they were made."""
    lengths = (9, 4, 3)
    mask_T = torch.tensor([0, 1, 1, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0]).float()
    turn_T = torch.tensor([0, 2, 2, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0], dtype=torch.int32)
    rewards_T = torch.tensor([0, 0, 1.0, 0, 0.5, 0, 0, -2.0, 0, 0, 0, 0, 3.0, 0, 0, 0])
    values_T = torch.randn(16, generator=torch.Generator().manual_seed(3))
    further_T = torch.randn(16, generator=torch.Generator().manual_seed(4)) * mask_T
    fields = {"values": values_T, "rewards": torch.full((16,), torch.nan), TURN: turn_T, TURN_REWARDS: rewards_T}
    batch = Batch(lengths, torch.zeros(16, dtype=torch.int64), mask_T, fields)
    gamma, lam = 0.9, 0.8
    advantages_T, returns_T = TurnGAE(gamma, lam).estimate(batch, further_T)
    turns = {0: [[4], [5, 6, 7], [1, 2]], 1: [[11, 12]]}
    wanted_advantages, wanted_returns = torch.zeros(16), torch.zeros(16)
    for own in turns.values():
        next_value = next_advantage = 0.0
        for places in reversed(own):
            reward = sum(float(rewards_T[p] + further_T[p]) for p in places)
            value = float(values_T[places[0]])
            next_advantage = reward + gamma * next_value - value + gamma * lam * next_advantage
            next_value = value
            wanted_advantages[places], wanted_returns[places] = next_advantage, next_advantage + value
    torch.testing.assert_close(advantages_T, wanted_advantages)
    torch.testing.assert_close(returns_T, wanted_returns)
    assert [part.numel() for part in TurnGAE(gamma, lam).estimate(batch.select([]))] == [0, 0]


def test_turns_of_one_token_are_gae_by_token() -> None:
    lengths, n = (4, 3), 7
    mask_T = torch.tensor([0.0, 1, 1, 1, 0, 1, 1])
    values_T = torch.randn(n, generator=torch.Generator().manual_seed(0))
    fields = {
        "values": values_T,
        "rewards": torch.tensor([2.0] * 4 + [5.0] * 3),
        TURN: torch.tensor([0, 0, 1, 2, 0, 0, 1], dtype=torch.int32),
        TURN_REWARDS: torch.tensor([0, 0, 0, 2.0, 0, 0, 5.0]),
    }
    batch = Batch(lengths, torch.zeros(n, dtype=torch.int64), mask_T, fields)
    for own, wanted in zip(TurnGAE(0.9, 0.7).estimate(batch), GAE(0.9, 0.7).estimate(batch), strict=True):
        torch.testing.assert_close(own, wanted)
