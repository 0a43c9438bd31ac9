"""The weights of multi-head latent attention, under Megatron-Core's names and Hugging Face's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fivefold.bridge.mapping import Shape
from fivefold.families.shape import LatentAttention, ModelShape


@dataclass(frozen=True)
class LatentWeight:
    """One weight of a layer's attention, but for the output projection."""

    megatron: str
    """Name relative to Megatron-Core's attention module."""
    hf: str
    """Name relative to Hugging Face's."""
    shape: Shape
    """Shape of the whole weight."""
    is_split: bool
    """Whether tensor parallelism cuts its rows, which are those of heads; else every rank has it whole."""


def latent_weights(shape: ModelShape, latent: LatentAttention) -> Iterator[LatentWeight]:
    """Yield the weights of one layer of a model."""
    hidden, n_heads = shape.hidden, shape.n_heads
    down, up = latent.kv_rank + latent.rope_dim, n_heads * (latent.nope_dim + latent.value_dim)
    if (rank := latent.query_rank) is not None:
        yield LatentWeight("linear_q_down_proj.weight", "q_a_proj.weight", (rank, hidden), False)
    yield LatentWeight("linear_kv_down_proj.weight", "kv_a_proj_with_mqa.weight", (down, hidden), False)
    if rank is None:
        yield LatentWeight("linear_q_proj.weight", "q_proj.weight", (shape.query_width, hidden), True)
    else:
        yield LatentWeight("q_layernorm.weight", "q_a_layernorm.weight", (rank,), False)
        yield LatentWeight("linear_q_up_proj.weight", "q_b_proj.weight", (shape.query_width, rank), True)
    yield LatentWeight("kv_layernorm.weight", "kv_a_layernorm.weight", (latent.kv_rank,), False)
    yield LatentWeight("linear_kv_up_proj.weight", "kv_b_proj.weight", (up, latent.kv_rank), True)
