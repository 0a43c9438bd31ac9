"""Importance corrections between the rollout engine, which sampled with probabilities q, and the trainer, with p_old.

The two have the same weights, and differ by kernels, precision, batch and, in mixtures of experts, by routes. Samples
of q estimate an expectation under p_old only if each is weighted by

    w_t = p_old,t / q_t            of its token: a biased estimate of low variance
    w   = prod_t w_t               of its whole sequence: unbiased

`weight` multiplies the surrogate of a token by w, truncated to `weight_cap`. `mask` leaves tokens out, by w_t, by w, or
by the geometric mean of the w_t of their sequence. `veto_below` leaves out the sequences that have a token with a
smaller w_t.

    TIS        weight=token, weight_cap=C               truncated (Yao et al. 2025, "Off-policy RL training")
    MIS        weight, mask_above=C, mask_below=0       masked (Liu et al. 2025, "When Speed Kills Stability")
    IcePop     weight=token, mask=token, in [0.5, 5]    Ling team 2025 (arXiv 2510.18855)
    decoupled  weight=token                             the objective of AReaL (Fu et al. 2025, arXiv 2505.24298):
                                                        sg(p_old / q) min(r A, clip(r) A) with r = p / p_old

Tokens that are left out cost nothing. They still count in the loss's divisor, so the others' weights do not change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from fivefold.algorithms.kl import bounded_exp, kl_estimate
from fivefold.algorithms.loss import Metrics, count, largest
from fivefold.algorithms.ragged import Sequences
from fivefold.config.presets import CORRECTIONS
from fivefold.config.schema.roles import RolloutCorrectionConfig


class Corrected(NamedTuple):
    """What a correction makes of T tokens."""

    weights_T: torch.Tensor
    """Factor of each token's surrogate; 0 on tokens that are left out."""
    kept_T: torch.Tensor
    """bool [T]: whether the token is trained and not left out."""
    metrics: Metrics


@dataclass(frozen=True)
class RolloutCorrection:
    """Weights and masks, as at the top of this file."""

    weight: Literal["token", "sequence"] | None = None
    weight_cap: float | None = None
    mask: Literal["token", "sequence", "geometric"] | None = None
    mask_above: float | None = None
    mask_below: float | None = None
    veto_below: float | None = None

    @staticmethod
    def automatic() -> RolloutCorrection:
        """Return what `actor.rollout_correction.method: auto` corrects with once it does: TIS by token."""
        return RolloutCorrection(**CORRECTIONS["tis"])

    @staticmethod
    def of(config: RolloutCorrectionConfig) -> RolloutCorrection | None:
        """Return the correction that a recipe asks for from the first step on; None: it asks for none."""
        if not config.is_fixed:
            return None
        below = config.mask_below
        if below is None and config.mask_above is not None:
            below = 1.0 / config.mask_above
        return RolloutCorrection(
            config.weight, config.weight_cap, config.mask, config.mask_above, below, config.veto_below
        )

    def __call__(self, old_T: torch.Tensor, rollout_T: torch.Tensor, sequences: Sequences) -> Corrected:
        """Compute weights and masks, without gradient.

        Args:
            old_T: log p_old, 0 on tokens that are not trained.
            rollout_T: log q, the same.
            sequences: whole sequences.
        """
        log_w_T = (old_T - rollout_T).detach()
        trained_T = sequences.mask_T.bool()
        kept_T = trained_T & self._inside(log_w_T, sequences)
        weights_T, is_truncated_T = self._weights(log_w_T, sequences)
        weights_T = torch.where(kept_T, weights_T, torch.zeros_like(weights_T))
        metrics = {
            "correction/truncated": count(is_truncated_T & kept_T, weights_T),
            "correction/masked": count(trained_T & ~kept_T, weights_T),
            "correction/weight": weights_T.sum(),
            "correction/weight_square": weights_T.square().sum(),
        }
        return Corrected(weights_T, kept_T, metrics)

    def _weights(self, log_w_T: torch.Tensor, sequences: Sequences) -> tuple[torch.Tensor, torch.Tensor]:
        if self.weight is None:
            return torch.ones_like(log_w_T), torch.zeros_like(log_w_T, dtype=torch.bool)
        if self.weight == "sequence":
            log_w_T = sequences.spread(sequences.sum(log_w_T))
        most = math.inf if self.weight_cap is None else math.log(self.weight_cap)
        return bounded_exp(log_w_T.clamp(max=most)), log_w_T > most

    def _inside(self, log_w_T: torch.Tensor, sequences: Sequences) -> torch.Tensor:
        inside_T = torch.ones_like(log_w_T, dtype=torch.bool)
        if self.mask is not None:
            log_m_T = log_w_T
            if self.mask != "token":
                of_sequence = sequences.sum if self.mask == "sequence" else sequences.mean
                log_m_T = sequences.spread(of_sequence(log_w_T))
            inside_T = (log_m_T >= _log(self.mask_below, -math.inf)) & (log_m_T <= _log(self.mask_above, math.inf))
        if self.veto_below is not None:
            below_T = (log_w_T < math.log(self.veto_below)).to(log_w_T.dtype)
            inside_T &= sequences.spread(sequences.sum(below_T)) == 0
        return inside_T


def _log(bound: float | None, otherwise: float) -> float:
    if bound is None:
        return otherwise
    return math.log(bound) if bound > 0 else -math.inf


def mismatch_metrics(trainer_T: torch.Tensor, rollout_T: torch.Tensor, trained_T: torch.Tensor) -> Metrics:
    """Measure how far the trainer's log-probs are from those of the rollout engine, at the same weights.

    Args:
        trainer_T, rollout_T: [T], zero where not trained.
        trained_T: bool [T].

    Returns:
        Sums over the tokens that have a log-prob of the rollout (the others are NaN in `rollout_T`), with d = trainer -
        rollout and w = exp(d): |d|; the estimates w - 1 - d of KL(rollout, trainer) and w d - (w - 1) of KL(trainer,
        rollout), neither of which is ever negative; w and w^2, from which the effective sample size follows; the number
        of these tokens; and the largest |d| and w.
    """
    known_T = trained_T & ~rollout_T.isnan()
    log_w_T = (trainer_T - torch.where(known_T, rollout_T, trainer_T)).detach()
    log_w_T = torch.where(known_T, log_w_T, torch.zeros_like(log_w_T))
    w_T = bounded_exp(log_w_T)
    zero_T = torch.zeros_like(w_T)
    one_T = known_T.to(w_T.dtype)
    return {
        "rollout_mismatch": log_w_T.abs().sum(),
        "rollout_mismatch/max": largest(log_w_T.abs(), known_T),
        "rollout_mismatch_kl": kl_estimate(zero_T, log_w_T, "k3").sum(),
        # w (log w - 1 + 1/w) in terms of k3 with the sign of d changed, which keeps the digits near w = 1.
        "rollout_mismatch_kl_reverse": (w_T * kl_estimate(zero_T, -log_w_T, "k3")).sum(),
        "rollout_mismatch_share": one_T.sum(),
        "rollout_ratio": (w_T * one_T).sum(),
        "rollout_ratio_square": (w_T.square() * one_T).sum(),
        "rollout_ratio/max": largest(w_T, known_T),
    }
