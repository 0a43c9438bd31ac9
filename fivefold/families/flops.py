"""Floating-point operations of a model by part (multiply and add are two).

Counted are the weights that multiply a token (attention projections, router, the experts it visits, dense MLPs, LM
head; never the embedding look-up), causal attention, in which a token sees half of its sequence on average, or the
window before it, and the recurrence of gated delta nets, token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from fivefold.families.shape import ModelShape

BACKWARD_AND_FORWARD = 3.0
"""Backward and forward FLOPs over forward FLOPs. Recomputation is not counted (MFU, not HFU)."""


@dataclass(frozen=True)
class PartFlops:
    """FLOPs of the parts of a model."""

    projections: float
    """Projections of attention: queries, keys, values and output."""
    attention: float
    """Scores and weighted values, and the recurrence of gated delta nets."""
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

    def weighted(self, shares: PartFlops) -> float:
        """Return the sum of the parts, each times its share."""
        return sum(value * share for value, share in zip(astuple(self), astuple(shares), strict=True))


@dataclass(frozen=True)
class ForwardFlops:
    """FLOPs of a model's forward pass, in units from which the FLOPs of any sequences follow."""

    projections: int
    """For each token, as are MLPs, experts and router."""
    attention: int
    """For each token and its sequence's length, because attention is quadratic."""
    window_attention: int
    """The same of layers with a sliding window, whose tokens see as many tokens as it has at most."""
    window: int
    """Tokens of the window; 0: no layer has one."""
    recurrence: int
    """For each token: what gated delta nets do in the place of attention."""
    dense_mlps: int
    experts: int
    router: int
    head: int
    """For each token that gets logits."""

    @staticmethod
    def of(shape: ModelShape) -> ForwardFlops:
        """Return the units of a model."""
        n_dense = shape.n_layers - shape.n_moe_layers
        mlps = n_dense * shape.dense_mlp_parameters + shape.n_moe_layers * shape.shared_expert_parameters
        return ForwardFlops(
            projections=2 * shape.all_projection_weights,
            attention=(shape.n_attention_layers - shape.n_window_layers) * (shape.query_width + shape.output_width),
            window_attention=shape.n_window_layers * (shape.query_width + shape.output_width),
            window=shape.window or 0,
            recurrence=shape.n_delta_layers * shape.delta.flops if shape.delta is not None else 0,
            dense_mlps=2 * mlps,
            experts=2 * shape.n_moe_layers * shape.top_k * shape.expert_parameters,
            router=2 * shape.n_moe_layers * shape.hidden * shape.n_experts,
            head=2 * shape.hidden * shape.output_rows,
        )

    def on(self, lengths: Sequence[int], n_predicted: int) -> PartFlops:
        """Return the FLOPs over sequences of `lengths` tokens. `n_predicted` of all tokens get logits."""
        seen = sum(self._in_windows(length) for length in lengths)
        return self._parts(sum(lengths), sum(length * length for length in lengths), seen, n_predicted)

    def on_equal(self, n_sequences: float, length: int) -> PartFlops:
        """Return the FLOPs over sequences of one length, with logits for every token."""
        tokens = n_sequences * length
        return self._parts(tokens, tokens * length, n_sequences * self._in_windows(length), tokens)

    def _in_windows(self, length: int) -> int:
        """Return twice the pairs of tokens of a sequence where one sees the other in a window."""
        seen = min(length, self.window)
        return seen * (2 * length - seen)

    def _parts(self, tokens: float, squares: float, in_windows: float, n_predicted: float) -> PartFlops:
        return PartFlops(
            projections=float(tokens * self.projections),
            attention=float(squares * self.attention + in_windows * self.window_attention + tokens * self.recurrence),
            dense_mlps=float(tokens * self.dense_mlps),
            experts=float(tokens * self.experts),
            router=float(tokens * self.router),
            head=float(n_predicted * self.head),
        )
