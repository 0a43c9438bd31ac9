"""Routers with auxiliary losses that packing does not change.

The auxiliary losses (Fedus et al. 2021, https://arxiv.org/abs/2101.03961, equations 4 to 6) are E sum_e f_e p_e, where
f_e is the share of the choices that fall on expert e, and p_e its mean probability, over

    aux_loss          the tokens of a micro-batch
    seq_aux_loss      the tokens of each sequence, weighted by their number (DeepSeek-V3, arXiv:2412.19437, equation 17)
    global_aux_loss   f_e: over all micro-batches of all replicas so far in the mini-batch; p_e: of a micro-batch

The choices are those that the router makes, within groups of experts where it is limited to some (DeepSeek-V2,
arXiv:2405.04434, equation 24), or replays. Of routers that choose by sigmoids and offsets, and replay nothing, f_e
counts the largest scores, without offsets and groups (DeepSeek-V3, equation 18).

Each token weighs as much as any other in the mean over a mini-batch. z_loss is Megatron-Core's own, the mean of
log^2 sum_e exp(logit_e) (Zoph et al. 2022, https://arxiv.org/abs/2202.08906, equation 5).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.transformer_config import TransformerConfig

from fivefold.mcore.router import LOSSES, Router


def has_auxiliary_losses(config: TransformerConfig) -> bool:
    """Return whether a recipe trains one of the auxiliary losses."""
    weight = config.moe_aux_loss_coeff
    weights = weight if isinstance(weight, list) else [weight]
    return any(weights) or config.moe_z_loss_coeff is not None


class BalancedRouter(Router):
    """A router that attaches the losses to its probabilities and logits, and sums them for the metrics."""

    def _apply_aux_loss(
        self, probs: torch.Tensor, scores_for_aux_loss: torch.Tensor, routing_map: torch.Tensor, **_unused: object
    ) -> torch.Tensor:
        if not (weight := self.get_aux_loss_coeff("aux_loss")):
            return probs
        count_E = self._sum(self._choices(probs, routing_map).sum(0).float(), self.tp_cp_group)
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
        assert self._micro_batch is not None, "the model has not noted this micro-batch"
        ids_T, n_sequences = self._micro_batch.ids_T, self._micro_batch.n_sequences
        zeros_SE = scores_for_aux_loss.new_zeros(n_sequences, self.num_experts)
        score_SE = zeros_SE.index_add(0, ids_T, scores_for_aux_loss)
        chosen_TE = self._choices(probs, routing_map).to(zeros_SE.dtype)
        count_SE = self._sum(zeros_SE.index_add(0, ids_T, chosen_TE), self.tp_cp_group)
        return self._attach("experts/seq_aux_loss", probs, weight, score_SE, count_SE)

    def _apply_global_aux_loss(
        self, probs: torch.Tensor, scores_for_aux_loss: torch.Tensor, routing_map: torch.Tensor, **_unused: object
    ) -> torch.Tensor:
        if not (weight := self.get_aux_loss_coeff("global_aux_loss")):
            return probs
        self._seen_E += self._sum(self._choices(probs, routing_map).sum(0).float(), self.tp_dp_cp_group)
        return self._attach("experts/global_aux_loss", probs, weight, scores_for_aux_loss.sum(0), self._seen_E.clone())

    def apply_z_loss(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Attach the loss that keeps logits small, as Megatron-Core does, and count it."""
        if self.config.moe_z_loss_coeff is not None and self.training and torch.is_grad_enabled():
            z_T = logits.detach().float().logsumexp(-1).square().reshape(-1)
            self._count("experts/z_loss", z_T if padding_mask is None else z_T[~padding_mask.reshape(-1)])
        return super().apply_z_loss(logits, padding_mask=padding_mask)

    def _choices(self, probs: torch.Tensor, routing_map: torch.Tensor) -> torch.Tensor:
        """Return bool [T, E]: the choices that a loss counts, none of filler.

        Megatron-Core makes a map of the largest scores for the losses, which for groups are not the choices, nor where
        choices are replayed.
        """
        is_limited = self.score_function == "softmax" and bool(self.config.moe_router_num_groups)
        is_replayed = self._micro_batch is not None and self._micro_batch.routes is not None
        if not is_limited and not is_replayed:
            return routing_map
        return (probs > 0) & routing_map.any(-1, keepdim=True)

    def _count(self, name: str, losses: torch.Tensor) -> None:
        self.losses_K[LOSSES.index(name)] += losses.detach().sum()

    def _sum(self, counts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        dist.all_reduce(counts, group=group)
        return counts

    def _attach(
        self, name: str, probs: torch.Tensor, weight: float, score_SE: torch.Tensor, count_SE: torch.Tensor
    ) -> torch.Tensor:
        """Return the probabilities, to which a loss is attached that the backward pass differentiates.

        It is the sum over sets of tokens of (number of tokens) * E sum_e f_e p_e; each rank attaches the part
        of its tokens' probabilities. The schedule divides all of them by the tokens of the mini-batch.

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
