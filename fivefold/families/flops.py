"""Floating-point operations of a model by part, counted from its shape (multiply and add are two).

Counted are the weights that multiply a token (attention projections, router, the experts it visits, dense MLPs, LM
head; never the embedding look-up) and causal attention, where a token sees half of its sequence on average.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from fivefold.families.shape import ModelShape
from fivefold.layout.parallel import ParallelLayout

BACKWARD_AND_FORWARD = 3.0
"""Times the FLOPs of the forward pass. Recomputation is not counted (MFU, not HFU)."""


@dataclass(frozen=True)
class PartFlops:
    """FLOPs of the parts of a model."""

    projections: float
    """Projections of attention: queries, keys, values and output."""
    attention: float
    """Scores and weighted values."""
    dense_mlps: float
    """Dense layers' MLPs and shared experts."""
    experts: float
    router: float
    head: float

    @property
    def total(self) -> float:
        """FLOPs of all parts together."""
        return float(sum(astuple(self)))

    def scaled(self, factor: float) -> PartFlops:
        """Return all parts times `factor`."""
        return PartFlops(*(factor * value for value in astuple(self)))


def training_flops(shape: ModelShape, lengths: Sequence[int], n_predicted: int) -> float:
    """Return the FLOPs of forward and backward over sequences of `lengths` tokens.

    `n_predicted` of all tokens get logits.
    """
    return BACKWARD_AND_FORWARD * forward_of(shape, lengths, n_predicted).total


def forward_of(shape: ModelShape, lengths: Sequence[int], n_predicted: int) -> PartFlops:
    """Return the FLOPs of one forward pass over sequences of `lengths` tokens, `n_predicted` of which get logits."""
    return _forward(shape, sum(lengths), sum(length * length for length in lengths), n_predicted)


def training_parts(shape: ModelShape, n_sequences: float, length: int) -> PartFlops:
    """Return the FLOPs of forward and backward over sequences of one length, with logits for every token."""
    return forward_parts(shape, n_sequences, length).scaled(BACKWARD_AND_FORWARD)


def forward_parts(shape: ModelShape, n_sequences: float, length: int) -> PartFlops:
    """Return the FLOPs of one forward pass over sequences of one length, with logits for every token."""
    tokens = n_sequences * length
    return _forward(shape, tokens, tokens * length, tokens)


def keys_of_latents(shape: ModelShape, layout: ParallelLayout) -> float:
    """Return the FLOPs that make keys and values of latents that ranks have exchanged, over those of all projections.

    Context-parallel ranks exchange latents; each makes the keys of all tokens that its queries see.
    """
    if shape.latent is None or layout.cp == 1:
        return 0.0
    return layout.seen_tokens * shape.latent.key_value_parameters(shape.n_heads) / _projection_weights(shape)


def keys_of_others(shape: ModelShape, layout: ParallelLayout) -> float:
    """Return the part of `keys_of_latents` that ranks make of other ranks' latents, which these make too."""
    return keys_of_latents(shape, layout) * (1 - 1 / layout.seen_tokens)


def _forward(shape: ModelShape, tokens: float, squares: float, n_predicted: float) -> PartFlops:
    """`squares` is the sum of the squared lengths of the sequences."""
    n_dense = shape.n_layers - shape.n_moe_layers
    mlps = n_dense * shape.dense_mlp_parameters + shape.n_moe_layers * shape.shared_expert_parameters
    return PartFlops(
        projections=2.0 * tokens * shape.n_layers * _projection_weights(shape),
        attention=1.0 * shape.n_layers * (shape.query_width + shape.output_width) * squares,
        dense_mlps=2.0 * tokens * mlps,
        experts=2.0 * tokens * shape.n_moe_layers * shape.top_k * shape.expert_parameters,
        router=2.0 * tokens * shape.n_moe_layers * shape.hidden * shape.n_experts,
        head=2.0 * n_predicted * shape.hidden * shape.output_rows,
    )


def _projection_weights(shape: ModelShape) -> int:
    """Return the weights of one layer's attention that are matrices: neither norms nor biases."""
    if shape.latent is not None:
        return shape.attention_parameters - shape.latent.latent_dim  # a norm has a weight for each channel
    return shape.hidden * (shape.query_width + shape.key_width + shape.value_width + shape.output_width)
