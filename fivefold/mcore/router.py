"""Megatron-Core's router, with auxiliary losses that packing does not change, and a count of each expert's load.

The auxiliary losses (Fedus et al. 2021, https://arxiv.org/abs/2101.03961, equations 4 to 6) are E sum_e f_e p_e, where
f_e is the share of the choices that fall on expert e, and p_e its mean probability, over

    aux_loss          the tokens of a micro-batch
    seq_aux_loss      the tokens of each sequence, weighted by their number (DeepSeek-V3, arXiv:2412.19437, equation 17)
    global_aux_loss   f_e: those of all micro-batches of all replicas so far in the mini-batch; p_e: of a micro-batch

Each token weighs as much as any other in the mean over a mini-batch. z_loss is Megatron-Core's own, the mean of
log^2 sum_e exp(logit_e) (Zoph et al. 2022, https://arxiv.org/abs/2202.08906, equation 5).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import nn

LOSSES = ("experts/aux_loss", "experts/seq_aux_loss", "experts/global_aux_loss", "experts/z_loss")
"""Metrics of the auxiliary losses."""


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


class Router(TopKRouter):
    """Chooses the experts of each token. T: the tokens of this rank. E: experts."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)
        device = torch.cuda.current_device()
        self.sequences: dict[int, tuple[torch.Tensor, int]] = {}
        """See `note_sequences`; all routers of a chunk of the model share one."""
        self.register_buffer("load_E", torch.zeros(self.num_experts, device=device), persistent=False)
        self._seen_E = torch.zeros(self.num_experts, device=device)
        self.losses_K = torch.zeros(len(LOSSES), device=device)
        """Sums of each auxiliary loss over this rank's tokens of the mini-batch, without its weight."""

    def start_mini_batch(self) -> None:
        """Forget the loads of the mini-batch before."""
        self.load_E.zero_()
        self._seen_E.zero_()
        self.losses_K.zero_()

    def _apply_expert_bias(self, *_: object, **_unused: object) -> None:
        """Count nothing for Megatron-Core's own update of the offsets, which comes even if a step is skipped."""

    @torch.no_grad()
    def balance(self, load_E: torch.Tensor) -> None:
        """Move the offset of each expert against its load, the tokens of all ranks that it got."""
        self.expert_bias += self.config.moe_router_bias_update_rate * torch.sign(load_E.mean() - load_E)

    def forward(
        self, input: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._ids = None if padding_mask is None else self.sequences.get(padding_mask.data_ptr())
        probs, chosen = super().forward(input, padding_mask=padding_mask)
        # What is computed again in the backward pass counts then, and only then.
        if self.training and torch.is_grad_enabled():
            counted = chosen if padding_mask is None else chosen & ~padding_mask.reshape(-1, 1)
            self.load_E += counted.sum(0)
        return probs, chosen

    def _apply_aux_loss(
        self, probs: torch.Tensor, scores_for_aux_loss: torch.Tensor, routing_map: torch.Tensor, **_unused: object
    ) -> torch.Tensor:
        if not (weight := self.get_aux_loss_coeff("aux_loss")):
            return probs
        count_E = self._sum(routing_map.sum(0).float(), self.tp_cp_group)
        return self._attach("experts/aux_loss", probs, weight, scores_for_aux_loss.sum(0), count_E)

    def _apply_seq_aux_loss(
        self,
        probs: torch.Tensor,
        scores_for_aux_loss: torch.Tensor,
        routing_map: torch.Tensor,
        *_: object,
        **_unused: object,
    ) -> torch.Tensor:
        if not (weight := self.get_aux_loss_coeff("seq_aux_loss")):
            return probs
        assert self._ids is not None, "the model has not noted the sequences of this micro-batch"
        ids_T, n_sequences = self._ids
        zeros_SE = scores_for_aux_loss.new_zeros(n_sequences, self.num_experts)
        score_SE = zeros_SE.index_add(0, ids_T, scores_for_aux_loss)
        count_SE = self._sum(zeros_SE.index_add(0, ids_T, routing_map.to(zeros_SE.dtype)), self.tp_cp_group)
        return self._attach("experts/seq_aux_loss", probs, weight, score_SE, count_SE)

    def _apply_global_aux_loss(
        self, probs: torch.Tensor, scores_for_aux_loss: torch.Tensor, routing_map: torch.Tensor, **_unused: object
    ) -> torch.Tensor:
        if not (weight := self.get_aux_loss_coeff("global_aux_loss")):
            return probs
        self._seen_E += self._sum(routing_map.sum(0).float(), self.tp_dp_cp_group)
        return self._attach("experts/global_aux_loss", probs, weight, scores_for_aux_loss.sum(0), self._seen_E.clone())

    def apply_z_loss(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Attach the loss that keeps logits small, as Megatron-Core does, and count it."""
        if self.config.moe_z_loss_coeff is not None and self.training and torch.is_grad_enabled():
            z_T = logits.detach().float().logsumexp(-1).square().reshape(-1)
            self._count("experts/z_loss", z_T if padding_mask is None else z_T[~padding_mask.reshape(-1)])
        return super().apply_z_loss(logits, padding_mask=padding_mask)

    def _count(self, name: str, losses: torch.Tensor) -> None:
        self.losses_K[LOSSES.index(name)] += losses.detach().sum()

    def _sum(self, counts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        dist.all_reduce(counts, group=group)
        return counts

    def _attach(
        self, name: str, probs: torch.Tensor, weight: float, score_SE: torch.Tensor, count_SE: torch.Tensor
    ) -> torch.Tensor:
        """Return the probabilities, to which a loss is attached that the backward pass differentiates.

        It is the sum over sets of tokens of (number of tokens) * E sum_e f_e p_e, of which each rank attaches the part
        of its own tokens' probabilities. The schedule divides all of them by the tokens of the mini-batch.

        Args:
            name: the loss, as its metric is called.
            probs: [T, E].
            weight: weight of the loss.
            score_SE: sums of this rank's probabilities over each set of tokens; [E] for one set.
            count_SE: the choices of all ranks, like `score_SE`.
        """
        choices_S = count_SE.sum(-1, keepdim=True).clamp(min=1)
        loss = self.num_experts * (count_SE / choices_S * score_SE).sum()
        self._count(name, loss)
        return MoEAuxLossAutoScaler.apply(probs, weight * loss)


def routers_of(chunks: Iterable[nn.Module]) -> list[Router]:
    """Return the routers of this rank's layers."""
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, Router)]


def note_sequences(routers: Sequence[Router], mask_1T: torch.Tensor, ids_T: torch.Tensor, n_sequences: int) -> None:
    """Tell routers which sequence each token of a micro-batch is of.

    Megatron-Core hands routers the mask of filler alone, at once and when a layer is computed again. The micro-batch is
    known by the mask's place in memory, which stays the same as long as the micro-batch exists.

    Args:
        routers: the routers of a chunk of the model.
        mask_1T: the mask that the layers get.
        ids_T: int64 [T], the index of each token's sequence.
        n_sequences: number of sequences.
    """
    for router in routers:
        router.sequences[mask_1T.data_ptr()] = (ids_T, n_sequences)


def start_mini_batch(routers: Sequence[Router]) -> None:
    """Make routers forget the mini-batch before."""
    for router in routers:
        router.start_mini_batch()
        router.sequences.clear()


def expert_loads(routers: Sequence[Router], n_layers: int, n_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what routers have counted in the mini-batch, on every rank.

    Returns:
        How many tokens each expert of each layer got, float32 [layers, E], and the sums of each layer's auxiliary
        losses over its tokens, float32 [layers, losses], in the order of `LOSSES`.
    """
    counted_LX = torch.zeros(n_layers, n_experts + len(LOSSES), device=torch.cuda.current_device())
    for router in routers:
        counted_LX[router.layer_number - 1] = torch.cat([router.load_E, router.losses_K])
    # Each token is on one rank of a stage, and each layer on one stage.
    dist.all_reduce(counted_LX)
    return counted_LX[:, :n_experts], counted_LX[:, n_experts:]
