"""Generalised advantage estimation in which a turn is one step: the discount and lambda count turns, not tokens.

Of the tokens of turn k, the first has the value of the state, V_k, and all have the advantage of the turn:

    delta_k = r_k + gamma * V_{k+1} - V_k,   A_k = delta_k + gamma * lam * A_{k+1},   return = A_k + V_k
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fivefold.algorithms.gae import GAE
from fivefold.batch import Batch

TURN, TURN_REWARDS = "turn", "turn_rewards"
"""Columns: number of the turn of each sampled token, and the reward of each turn on its last token."""


@dataclass(frozen=True)
class TurnGAE(GAE):
    """The constants, by turn."""

    def estimate(self, batch: Batch, token_rewards_T: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return advantages and returns, float32 [T] each, 0 on tokens that are not trained.

        Args:
            batch: its fields `values`, `turn` and `turn_rewards` are read.
            token_rewards_T: further rewards of single tokens, [T].
        """
        trained_T = batch.mask_T.bool()
        rewards_T = batch.fields[TURN_REWARDS] + (0.0 if token_rewards_T is None else token_rewards_T)
        rows_T = torch.repeat_interleave(torch.arange(len(batch)), torch.tensor(batch.lengths, dtype=torch.int64))
        # By row, and in it in the order in which turns were made, whichever sequence of the row they are in.
        keys_S2 = torch.stack([rows_T[trained_T], batch.fields[TURN][trained_T].long()], dim=1)
        turns_K2, places_S = torch.unique(keys_S2, dim=0, return_inverse=True)
        n, order_S = len(turns_K2), torch.arange(len(places_S))
        first_K = torch.full((n,), len(places_S)).scatter_reduce_(0, places_S, order_S, "amin")
        turns = Batch(
            tuple(torch.bincount(turns_K2[:, 0], minlength=len(batch)).tolist()),
            torch.zeros(n, dtype=torch.int64),
            torch.ones(n),
            {"values": batch.fields["values"][trained_T][first_K], "rewards": torch.zeros(n)},
        )
        rewards_K = torch.zeros(n, dtype=torch.float64).index_add_(0, places_S, rewards_T[trained_T].double())
        advantages_T, returns_T = (torch.zeros(batch.n_tokens) for _ in range(2))
        for own_T, own_K in zip((advantages_T, returns_T), super().estimate(turns, rewards_K), strict=True):
            own_T[trained_T] = own_K[places_S]
        return advantages_T, returns_T
