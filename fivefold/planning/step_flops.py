"""Floating-point operations of a step by part of the model; their sum is `fivefold.families.flops.training_flops`."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from fivefold.families.plan_shape import PlanShape


@dataclass(frozen=True)
class PartFlops:
    """FLOPs (multiply and add are two) by part."""

    projections: float
    """Of attention: queries, keys, values and output."""
    attention: float
    """Scores and weighted values, causal: half of all pairs."""
    dense_mlps: float
    """Dense layers' MLPs and shared experts."""
    experts: float
    router: float
    head: float

    @property
    def total(self) -> float:
        return float(sum(astuple(self)))

    def scaled(self, factor: float) -> PartFlops:
        """All parts times `factor`."""
        return PartFlops(*(factor * value for value in astuple(self)))


def forward_parts(shape: PlanShape, n_sequences: float, length: int) -> PartFlops:
    """One forward pass over `n_sequences` of `length` tokens, with logits for every token."""
    tokens = n_sequences * length
    n_dense = shape.n_layers - shape.n_moe_layers
    routers = shape.n_moe_layers * shape.hidden * shape.n_experts
    mlps = n_dense * shape.dense_mlp_parameters + shape.n_moe_layers * shape.shared_expert_parameters
    return PartFlops(
        projections=2.0 * tokens * shape.n_layers * _projection_weights(shape),
        attention=float(shape.n_layers) * (shape.query_width + shape.output_width) * n_sequences * length * length,
        dense_mlps=2.0 * tokens * mlps,
        experts=2.0 * tokens * shape.n_moe_layers * shape.top_k * shape.expert_parameters,
        router=2.0 * tokens * routers,
        head=2.0 * tokens * shape.hidden * shape.vocab,
    )


def training_parts(shape: PlanShape, n_sequences: float, length: int) -> PartFlops:
    """Forward and backward: three times the forward pass. Recomputation is not counted."""
    return forward_parts(shape, n_sequences, length).scaled(3.0)


def _projection_weights(shape: PlanShape) -> int:
    """Of one layer, the weights of matmuls: neither norms nor biases."""
    if shape.latent is not None:
        norms = shape.latent.query_rank + shape.latent.kv_rank
        return shape.attention_parameters - norms
    return shape.hidden * (shape.query_width + shape.key_width + shape.value_width + shape.output_width)
