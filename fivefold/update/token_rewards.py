"""Rewards of single tokens in an update: what each token has earned, and what is earned from it on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fivefold.algorithms.gae import TOKEN_REWARDS
from fivefold.algorithms.reward_shaping import RewardShaping
from fivefold.batch import Columns
from fivefold.cluster.group import put
from fivefold.rewards.token_rewards import TokenRewards
from fivefold.roles.remote_batch import Piece, RemoteBatch
from fivefold.types import Sample
from fivefold.update.step import Part, Prepared


@dataclass(frozen=True)
class RewardsOfTokens(Part):
    """Tells the critic's estimate what each token has earned."""

    shaping: RewardShaping | None

    def prepare(self, step: Prepared) -> Prepared:
        """Add the column `token_rewards`."""
        rewards = token_rewards(step.samples, step.batch, self.shaping)
        return replace(step, batch=_with_column(step.batch, TOKEN_REWARDS, rewards))


@dataclass(frozen=True)
class TokenReturns(Part):
    """Gives each token what is earned from it on: A_t = R - the sum of r_s over the tokens s before t.

    R is the shaped reward of the sample. What its tokens have not earned belongs to the last one, so that A of the
    first token is R.
    """

    shaping: RewardShaping | None

    def prepare(self, step: Prepared) -> Prepared:
        """Add the column `advantages`."""
        rewards = token_rewards(step.samples, step.batch, self.shaping)
        returns = [
            total - (np.cumsum(rewards_L) - rewards_L)
            for total, rewards_L in zip(step.values_N.astype(np.float64), rewards, strict=True)
        ]
        return replace(step, batch=_with_column(step.batch, "advantages", returns))


def token_rewards(
    samples: Sequence[Sample], batch: RemoteBatch, shaping: RewardShaping | None
) -> list[npt.NDArray[np.float64]]:
    """Return what each token of each row has earned, float64 [tokens of the row], in the scale of shaped rewards.

    Bias, clip and penalties on the length concern the whole response, and are not among them.
    """
    scale = 1.0 if shaping is None else shaping.scaling
    rows = []
    for sample, length in zip(samples, batch.lengths_N.tolist(), strict=True):
        row_L = np.zeros(length)
        for name, reward in sample.rewards.items():
            if isinstance(reward, TokenRewards) and reward.places:
                row_L[list(reward.places)] += scale * sample.weights.get(name, 1.0) * np.array(reward.values)
        rows.append(row_L)
    return rows


def _with_column(batch: RemoteBatch, name: str, rows: Sequence[npt.NDArray[np.float64]]) -> RemoteBatch:
    values_T = np.concatenate(rows).astype(np.float32)
    columns = Columns(batch.lengths_N.astype(np.int32), {name: values_T})
    return batch.with_pieces([Piece(put(columns), np.arange(len(batch)))])
