"""What routers choose: the best experts by their scores, or experts that were recorded before (router replay).

A router of Megatron-Core asks its `router_replay` for its choice. `Choice` takes that place, without Megatron-Core's
own list of all routers, which does not know one micro-batch from another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fivefold.engine.routes import MicroBatchRoutes, replayed
from fivefold.routes import route_dtype

BestExperts = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""(scores [T, E], top_k, groups, groups of a token) -> scores and indices of the best experts, [T, top_k] both."""


@dataclass(frozen=True)
class BestGroups:
    """The best experts of the groups whose best `n_best` experts have the largest scores.

    By itself, Megatron-Core ranks a group by the best top_k / group_topk experts, which are 2 for DeepSeek-V2, where
    the model has 1.
    """

    n_best: int

    def __call__(
        self, scores_TE: torch.Tensor, top_k: int, n_groups: int, groups_per_token: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores and the indices of the experts of each token, [T, top_k] both."""
        scores_TGE = scores_TE.unflatten(1, (n_groups, -1))
        ranks_TG = scores_TGE.topk(self.n_best, dim=-1).values.sum(-1)
        chosen = ranks_TG.topk(groups_per_token, dim=-1).indices
        hidden_TG = torch.ones_like(ranks_TG, dtype=torch.bool).scatter(1, chosen, False)
        limited_TE = scores_TGE.masked_fill(hidden_TG.unsqueeze(-1), -torch.inf).flatten(1)
        best: tuple[torch.Tensor, torch.Tensor] = limited_TE.topk(top_k, dim=-1)
        return best


class Choice:
    """What one router chooses. T: the tokens of this rank. K: experts of a token."""

    def __init__(self, best: BestExperts | None, row: int | None = None) -> None:
        """Begin without routes.

        Args:
            best: how the router's own choice is made; None: as Megatron-Core does.
            row: index of the router among all of this rank; None: its choice is neither recorded nor replayed.
        """
        self._best = best
        self.row = row
        self.routes: MicroBatchRoutes | None = None
        """The routes of the micro-batch that the router works on."""
        self.counts_3: torch.Tensor | None = None
        """What `replayed` has counted of the tokens of the mini-batch, with a gradient."""

    def get_replay_topk(
        self, scores_TE: torch.Tensor, topk: int, num_groups: int, group_topk: int, default: BestExperts
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores and the indices of the experts of each token, [T, topk] both."""
        own = (self._best or default)(scores_TE, topk, num_groups, group_topk)
        if self.row is None or self.routes is None:
            return own
        self.routes.used(self.row, counts=torch.is_grad_enabled())
        given_TLK = self.routes.routes.given_TLK
        if given_TLK is None:
            self.routes.chosen[self.row] = own[1].to(route_dtype(scores_TE.shape[1]))
            return own
        chosen_TK, counts_3 = replayed(own[1], given_TLK[:, self.row], scores_TE.shape[1])
        if torch.is_grad_enabled():
            self.counts_3 = counts_3 if self.counts_3 is None else self.counts_3 + counts_3
        return scores_TE.gather(1, chosen_TK), chosen_TK
