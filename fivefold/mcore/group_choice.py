"""The choice of experts from a few groups of them (DeepSeek-V2, DeepSeek-V3)."""

from __future__ import annotations

import torch


class GroupChoice:
    """Chooses experts from the groups whose best experts have the largest scores.

    It takes the place of a router's `router_replay`, which Megatron-Core asks for the choice. By itself, Megatron-Core
    ranks a group by the best top_k / group_topk experts, which are 2 for DeepSeek-V2, where the model has 1.
    """

    def __init__(self, n_best: int) -> None:
        """`n_best` is the number of experts of a group whose scores are added to rank it."""
        self._n_best = n_best

    def get_replay_topk(
        self, scores_TE: torch.Tensor, topk: int, num_groups: int, group_topk: int, _default: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores and the indices of the experts of each token, [T, topk] both."""
        scores_TGE = scores_TE.unflatten(1, (num_groups, -1))
        ranks_TG = scores_TGE.topk(self._n_best, dim=-1).values.sum(-1)
        chosen = ranks_TG.topk(group_topk, dim=-1).indices
        hidden_TG = torch.ones_like(ranks_TG, dtype=torch.bool).scatter(1, chosen, False)
        limited_TE = scores_TGE.masked_fill(hidden_TG.unsqueeze(-1), -torch.inf).flatten(1)
        best: tuple[torch.Tensor, torch.Tensor] = limited_TE.topk(topk, dim=-1)
        return best
