"""Megatron-Core's router, with a count of each expert's load that packing and recomputation do not change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from torch import nn

from fivefold.engine.routes import MicroBatchRoutes
from fivefold.mcore.choice import Choice

LOSSES = ("experts/aux_loss", "experts/seq_aux_loss", "experts/global_aux_loss", "experts/z_loss")
"""Metrics of the auxiliary losses."""


@dataclass(frozen=True)
class Noted:
    """What routers know of a micro-batch."""

    ids_T: torch.Tensor
    """int64 [T], the index of each token's sequence."""
    n_sequences: int
    routes: MicroBatchRoutes | None
    """None: routers choose, and nothing is recorded."""


class Router(TopKRouter):
    """Chooses the experts of each token. T: the tokens of this rank. E: experts."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)
        device = torch.cuda.current_device()
        self.noted: dict[int, Noted] = {}
        """See `note_micro_batch`."""
        self.choice: Choice | None = None
        """What it chooses; None: what Megatron-Core chooses."""
        self.register_buffer("load_E", torch.zeros(self.num_experts, device=device), persistent=False)
        self._seen_E = torch.zeros(self.num_experts, device=device)
        self.losses_K = torch.zeros(len(LOSSES), device=device)
        """Sums of each auxiliary loss over this rank's tokens of the mini-batch, without its weight."""

    def add_bias(self) -> None:
        """Add a bias to the logits, which Megatron-Core has for models alone that have biases everywhere."""
        device = torch.cuda.current_device()
        self.bias = nn.Parameter(torch.empty(self.num_experts, dtype=self.config.params_dtype, device=device))
        vars(self.bias)["sequence_parallel"] = self.config.sequence_parallel

    def start_mini_batch(self) -> None:
        """Forget the loads of the mini-batch before."""
        self.load_E.zero_()
        self._seen_E.zero_()
        self.losses_K.zero_()
        if self.choice is not None:
            self.choice.counts_3 = None

    def _apply_expert_bias(self, *_: object, **_unused: object) -> None:
        """Count nothing for Megatron-Core's own update of the offsets, which comes even if a step is skipped."""

    @torch.no_grad()
    def balance(self, load_E: torch.Tensor) -> None:
        """Move the offset of each expert against its load, the tokens of all ranks that it got."""
        self.expert_bias += self.config.moe_router_bias_update_rate * torch.sign(load_E.mean() - load_E)

    def forward(
        self, input: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._micro_batch = None if padding_mask is None else self.noted.get(padding_mask.data_ptr())
        if self.choice is not None and self.choice.row is not None:
            assert self._micro_batch is not None, "the model has not noted this micro-batch"
            self.choice.routes = self._micro_batch.routes
        probs, chosen = super().forward(input, padding_mask=padding_mask)
        # What is computed again in the backward pass counts then, and only then.
        if self.training and torch.is_grad_enabled():
            counted = chosen if padding_mask is None else chosen & ~padding_mask.reshape(-1, 1)
            self.load_E += counted.sum(0)
        # The softmax is in float32: probabilities of float64 would only make what travels to the experts larger.
        return probs.float() if probs.dtype == torch.float64 else probs, chosen


def routers_of(chunks: Iterable[nn.Module]) -> list[Router]:
    """Return the routers of this rank's layers."""
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, Router)]


def note_micro_batch(routers: Sequence[Router], mask_1T: torch.Tensor, noted: Noted) -> None:
    """Tell routers what they cannot know of a micro-batch.

    Megatron-Core hands routers the mask of filler alone, at once and when a layer is computed again. The micro-batch is
    known by the mask's place in memory, which stays the same as long as the micro-batch exists.

    Args:
        routers: the routers of a chunk of the model.
        mask_1T: the mask that the layers get.
        noted: what they get to know.
    """
    for router in routers:
        router.noted[mask_1T.data_ptr()] = noted


def forget_micro_batches(routers: Sequence[Router]) -> None:
    """Make routers forget all micro-batches."""
    for router in routers:
        router.noted.clear()


def start_mini_batch(routers: Sequence[Router]) -> None:
    """Make routers forget the mini-batch before."""
    for router in routers:
        router.start_mini_batch()
    forget_micro_batches(routers)


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
