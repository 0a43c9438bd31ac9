"""How the difference between the rollout engine and the trainer is corrected."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from fivefold.config.algorithms import CorrectionName
from fivefold.config.schema.fields import NonNegativeFloat, PositiveFloat, Section
from fivefold.config.schema.rules import differs, equals, given, needs, reads_if, rule

_BY_W = equals("mask", "token", "turn", "sequence", "geometric", "largest")
_CORRECTS = reads_if(differs("method", "auto", "none", fix="set method to custom"))


_RANGES = (
    ("weight_floor", "weight_cap"),
    ("mask_below", "mask_above"),
    ("difference_below", "difference_above"),
)


class RolloutCorrectionConfig(Section):
    """Importance corrections for the difference between the rollout engine, which sampled, and the trainer.

    With w = p_old / q of a token, p_old the trainer's probability before the step and q the rollout's, `weight`
    multiplies losses by w, and `mask` leaves tokens out by w (docs/algorithms.md). With `recompute_logprob: false`, p
    of the update takes the place of p_old.
    """

    method: CorrectionName = "auto"
    """`auto`: `tis` from the step on after one with a `rollout_mismatch_kl` above `auto_threshold`. `none`: no
    correction. `custom`: what the keys below say. Others set the keys below that the recipe does not write."""
    auto_threshold: Annotated[NonNegativeFloat, reads_if(equals("method", "auto"), warns=True)] = 1e-3
    """KL divergence from rollout to trainer, in nats per token, above which `auto` corrects from then on."""
    weight: Annotated[Literal["token", "sequence"] | None, _CORRECTS] = None
    """Weight the losses of tokens by w of the token, or by the product of w over its sequence; null: by 1."""
    weight_cap: Annotated[PositiveFloat | None, reads_if(given("weight"))] = None
    """Weights are truncated to this value; null: they are not truncated."""
    weight_floor: Annotated[PositiveFloat | None, reads_if(given("weight"))] = None
    """Smaller weights are raised to this value; null: none are."""
    weight_normalized: Annotated[
        bool,
        reads_if(given("weight")),
        needs(True, equals("prox_logp_method", "recompute"), "needs old log-probs before the update"),
    ] = False
    """Divide weights by their mean over the mini-batch's tokens, or sequences if `weight` is `sequence`."""
    mask: Annotated[
        Literal["token", "turn", "sequence", "geometric", "largest", "second_moment"] | None,
        _CORRECTS,
        needs("second_moment", equals("prox_logp_method", "recompute"), "needs old log-probs before the update"),
    ] = None
    """Leave out tokens whose w is out of bounds, turns by its geometric mean, or whole sequences by the product, the
    geometric mean or the largest of w; `second_moment`: the tokens of the largest (log w)^2, until its mean over a
    mini-batch is at most `mask_above` (M2PO); null: leave out none."""
    mask_by: Annotated[
        Literal["ratio", "k2", "k3", "error", "binary_kl"],
        reads_if(_BY_W),
    ] = "ratio"
    """What `mask` compares with its bounds: w, or a divergence of the token, whose sum, mean or largest value over a
    sequence then counts: (log w)^2 / 2, w - 1 - log w, the larger of w and 1 / w, or the divergence of this token
    against all others."""
    mask_above: Annotated[PositiveFloat | None, reads_if(given("mask"))] = None
    """Upper bound of `mask`; null: none."""
    mask_below: Annotated[
        NonNegativeFloat | None,
        reads_if(_BY_W),
        reads_if(equals("mask_by", "ratio")),
    ] = None
    """Lower bound of w for `mask`; null: 1 / `mask_above`."""
    difference_above: Annotated[float | None, reads_if(_BY_W)] = None
    """Leave out also what has a larger p_old - q, put together as `mask` does; null: nothing."""
    difference_below: Annotated[float | None, reads_if(_BY_W)] = None
    """The same of a smaller p_old - q, such as -0.1."""
    veto_below: Annotated[PositiveFloat | None, _CORRECTS] = None
    """Leave out whole sequences that have a token with a smaller w; null: leave out none."""

    @property
    def is_fixed(self) -> bool:
        """Whether the recipe itself asks for a correction, which then holds from the first step on."""
        return self.method not in ("auto", "none")

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether something is computed of a whole mini-batch's log-probs before it is trained on."""
        return self.mask == "second_moment" or self.weight_normalized

    @property
    def has_lower_bound(self) -> bool:
        """Whether `mask` has a lower bound besides the upper one: divergences and second moments have none."""
        return self.mask != "second_moment" and self.mask_by == "ratio"

    @rule
    def _bounds(self) -> Iterator[str]:
        keys = ("weight", "mask", "veto_below")
        if self.method == "custom" and all(getattr(self, name) is None for name in keys):
            yield f"method=custom corrects nothing: set one of {', '.join(keys)}, or method to none"
        if self.mask is not None and self.mask_above is None and self.mask_below is None:
            yield f"mask={self.mask} has no bounds: set mask_above"
        for low, high in _RANGES:
            least, most = getattr(self, low), getattr(self, high)
            if least is not None and most is not None and least > most:
                yield f"{low}={least} is above {high}={most}: lower the first"
