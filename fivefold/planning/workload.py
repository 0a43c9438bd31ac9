"""The work of one optimizer step: the inputs of a plan that are neither model nor layout."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

from fivefold.layout.parallel import ParallelLayout

if TYPE_CHECKING:
    from fivefold.config.schema.engine import FlashAttention
    from fivefold.config.schema.megatron import RecomputeModule

Recompute = Literal["none", "selective", "full"]
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)
"""Recompute modes, from the most memory to the most computation."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes of the optimizer's state per parameter of a shard, and where they are."""

    master: int = 4
    """Bytes of a master weight in addition to its bfloat16 weight: 4 in float32, 2 for the remainder."""
    exp_avg: int = 4
    """Bytes of the first moment."""
    exp_avg_sq: int = 4
    """Bytes of the second moment."""
    on_host: bool = False
    """Whether they are in host memory and pass through the GPU in buckets."""

    def of(self, element_bytes: int) -> int:
        """Return all bytes of a parameter whose weight has `element_bytes`. Float32 weights are their own masters."""
        return (self.master if element_bytes < 4 else 0) + self.exp_avg + self.exp_avg_sq


@dataclass(frozen=True)
class Workload:
    """Sequences of equal length, packed into micro-batches."""

    sequence_length: int
    """Tokens of a sequence, prompt and response."""
    sequences: int
    """Sequences of one optimizer step, over all data-parallel ranks."""
    micro_tokens: int
    """Most tokens of a micro-batch, over its context-parallel ranks. A longer sequence gets a separate micro-batch."""
    recompute: Recompute = "none"
    recompute_modules: tuple[RecomputeModule, ...] = ("mlp", "moe")
    """Modules that `selective` recomputes."""
    recompute_layers: int = 1
    """Layers that `full` recomputes at a time; with `recompute_block`, the first layers of each virtual stage."""
    recompute_block: bool = False
    """Whether `full` recomputes only some layers of each virtual stage."""
    micro_batch_group: int | None = None
    """Micro-batches that a virtual stage computes before the next one; None: as many as stages."""
    attn_impl: FlashAttention = "flash_attention_2"
    """Flash attention of the layers."""
    fused_activation: bool = False
    """Whether dense MLPs and shared experts compute their activation in one kernel."""
    fla: bool = False
    """Whether the package fla-core computes gated delta nets."""
    element_bytes: int = 2
    """Bytes of a weight and of an activation: 2 for bfloat16, 4 for float32."""
    logprob_chunk: int = 1024
    """Tokens whose logits are computed together."""
    logprob_recompute: bool = True
    """Whether the backward pass recomputes the logits; otherwise a micro-batch's logits are kept for it."""
    n_fields: int = 5
    """Float32 values of each token: advantages, old log-probs and the like."""
    gradient_bytes: int = 4
    """Bytes of a gradient: 4 for float32, 2 for bfloat16."""
    state: StateBytes = StateBytes()
    """The optimizer's state."""
    kept_gathered: float = 0.0
    """Share of all layers' weights that FSDP keeps gathered from their forward to their backward pass."""
    prefetched: int = 0
    """Layers whose weights FSDP gathers ahead of the next one."""
    given_sequences: int = 0
    """Additional sequences with given responses, such as an expert's, in an optimizer step."""
    given_length: int = 0
    """Tokens of each given sequence."""
    infer_tokens: int | None = None
    """Most tokens of a micro-batch in passes without gradients; None: `micro_tokens`."""
    sends_parts: bool = True
    """Whether Fivefold's own bridge sends the weights, which can read those that are not trained from host memory."""

    def __post_init__(self) -> None:
        for name in ("sequence_length", "sequences", "micro_tokens", "logprob_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")

    def recomputing(self, recompute: Recompute) -> Workload:
        """Return the same work under a recompute mode, with the mode's defaults unless it is the work's own mode."""
        if recompute == self.recompute:
            return self
        plain = Workload(self.sequence_length, self.sequences, self.micro_tokens)
        details = ("recompute_modules", "recompute_layers", "recompute_block")
        return replace(self, recompute=recompute, **{name: getattr(plain, name) for name in details})

    def without_gradients(self, micro_tokens: int) -> Workload:
        """Return the work of passes without gradients, which hold one layer and one chunk of logits at a time."""
        plain = self.recomputing("none").recomputing("full")
        return replace(plain, micro_tokens=micro_tokens, logprob_recompute=True)

    @property
    def sequences_per_micro_batch(self) -> int:
        """Sequences of the fullest micro-batch."""
        return max(1, self.micro_tokens // self.sequence_length)

    @property
    def tokens_per_micro_batch(self) -> int:
        """Tokens of the fullest micro-batch, over its context-parallel ranks."""
        return max(self.sequence_length, self.micro_tokens, self.given_length)

    @property
    def tokens(self) -> int:
        """All tokens of a step."""
        return self.sequences * self.sequence_length + self.given_sequences * self.given_length

    @property
    def trained_sequences(self) -> float:
        """All sequences of a step. Given ones are converted to sequences of `sequence_length` with as many tokens."""
        return self.tokens / self.sequence_length

    def micro_batches(self, layout: ParallelLayout) -> int:
        """Return the micro-batches of each data-parallel rank; a multiple of the stages if these are interleaved."""
        sequences = math.ceil(self.trained_sequences / layout.dp)
        count = -(-sequences // self.sequences_per_micro_batch)
        return -(-count // layout.pp) * layout.pp if layout.vpp > 1 else count
