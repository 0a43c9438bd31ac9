"""Floating-point operations of a model, counted by hand from its shape (multiply and add are two)."""

from __future__ import annotations

from collections.abc import Sequence

from fivefold.families.shape import ModelShape


def forward_flops(shape: ModelShape, lengths: Sequence[int], n_predicted: int) -> float:
    """FLOPs of one forward pass over sequences of `lengths` tokens, with logits for `n_predicted` of them.

    Counted are the weights that multiply a token (attention projections, router, the experts it visits, dense MLPs, LM
    head; never the embedding look-up) and causal attention, where a token sees half of its sequence on average.
    """
    tokens = sum(lengths)
    moe = shape.hidden * shape.n_experts + shape.top_k * shape.expert_parameters
    moe += 3 * shape.hidden * shape.shared_expert_ffn_hidden
    dense = 3 * shape.hidden * shape.ffn_hidden
    queries, keys = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    attention = shape.hidden * (queries + 2 * keys) + queries * shape.hidden
    weights = shape.n_layers * attention + shape.n_moe_layers * moe + (shape.n_layers - shape.n_moe_layers) * dense
    scores = 2.0 * shape.n_layers * queries * sum(length * length for length in lengths)
    return 2.0 * weights * tokens + scores + 2.0 * shape.hidden * shape.vocab * n_predicted


def training_flops(shape: ModelShape, lengths: Sequence[int], n_predicted: int) -> float:
    """FLOPs of forward and backward: three times the forward pass. Recomputation is not counted (MFU, not HFU)."""
    return 3.0 * forward_flops(shape, lengths, n_predicted)
