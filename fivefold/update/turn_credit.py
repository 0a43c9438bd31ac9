"""Credit by turn: what each move of an episode gets, as columns of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fivefold.algorithms.advantages.compute import Scores
from fivefold.algorithms.gae import Moments
from fivefold.algorithms.reward_shaping import RewardShaping
from fivefold.algorithms.turn_gae import TURN, TURN_REWARDS
from fivefold.algorithms.turns import Moves, returns
from fivefold.roles.remote_batch import RemoteBatch, Spans
from fivefold.types import Sample
from fivefold.update.step import Part, Prepared


@dataclass(frozen=True)
class TurnAdvantages(Part):
    """Gives the tokens of each move its advantage."""

    method: Callable[[Scores], torch.Tensor]
    compares: bool
    """Whether the method compares the episodes of a group."""
    discount: float
    """Factor of the reward of each next turn."""
    state_weight: float | None
    """Weight of the comparison in equal states; None: moves are compared by their number."""
    shaping: RewardShaping | None

    def prepare(self, step: Prepared) -> Prepared:
        """Add the column `advantages`."""
        rewards = move_rewards(step.samples, self.shaping)
        moves = Moves(
            torch.tensor([each for own in rewards for each in returns(own, self.discount)], dtype=torch.float64),
            torch.tensor([index for index, sample in enumerate(step.samples) for _ in sample.moves]),
            torch.tensor([move.n_tokens for sample in step.samples for move in sample.moves]),
            [number for sample in step.samples for number in range(len(sample.moves))],
            [move.state for sample in step.samples for move in sample.moves],
            [sample.prompt.index for sample in step.samples for _ in sample.moves],
        )
        episodes_N = torch.from_numpy(step.values_N)
        if self.state_weight is None:
            advantages_M = moves.by_turn(self.method, episodes_N, compares=self.compares)
        else:
            advantages_M = moves.by_state(self.method, episodes_N, self.state_weight)
        of_turns = Moments.of(advantages_M)
        batch = _with_column(step, "advantages", advantages_M.float().numpy())
        return replace(step, batch=batch).measured({"advantage/mean": of_turns.mean, "advantage/std": of_turns.std})


@dataclass(frozen=True)
class TurnRewards(Part):
    """Tells the critic's estimate where turns are, and what each has earned."""

    shaping: RewardShaping | None

    def prepare(self, step: Prepared) -> Prepared:
        """Add the columns `turn` and `turn_rewards`."""
        numbers = [number for sample in step.samples for number in range(len(sample.moves))]
        earned = [reward for own in move_rewards(step.samples, self.shaping) for reward in own]
        step = replace(step, batch=_with_column(step, TURN, np.array(numbers, np.int32)))
        return replace(step, batch=_with_column(step, TURN_REWARDS, np.array(earned, np.float32), last=True))


def move_rewards(samples: Sequence[Sample], shaping: RewardShaping | None) -> list[list[float]]:
    """Return the reward of each move of each sample; together a sample has its shaped reward.

    The last move has what was not given for another one, such as the rewards of functions and penalties on length.
    """
    total_N = torch.tensor([sample.reward for sample in samples], dtype=torch.float64)
    scale = 1.0 if shaping is None else shaping.scaling
    if shaping is not None:
        total_N = shaping(total_N, torch.tensor([sample.n_sampled for sample in samples]))
    found = []
    for sample, total in zip(samples, total_N.tolist(), strict=True):
        before = [
            scale * sum(sample.weights.get(name, 1.0) * value for name, value in move.rewards.items())
            for move in sample.moves[:-1]
        ]
        found.append([*before, total - sum(before)])
    return found


def _with_column(step: Prepared, name: str, values_M: npt.NDArray[Any], *, last: bool = False) -> RemoteBatch:
    """Return the step's batch with a column of a value for each move; `last`: on the move's last token alone."""
    values, rows = iter(values_M.tolist()), []
    for sample in step.samples:
        moves = list(zip(sample.moves, values, strict=False))
        if last:
            rows.append([(move.start + move.n_tokens - 1, 1, value) for move, value in moves])
        else:
            rows.append([(move.start, move.n_tokens, value) for move, value in moves])
    return step.batch.with_spans(**{name: Spans(tuple(rows), values_M.dtype)})
