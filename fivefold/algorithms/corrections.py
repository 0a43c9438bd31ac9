"""Importance corrections between the rollout engine, which sampled with probabilities q, and the trainer, with p_old.

The two have the same weights, and differ by kernels, precision, batch and, in mixtures of experts, by routes. Samples
of q estimate an expectation under p_old only if each is weighted by

    w_t = p_old,t / q_t            of its token: a biased estimate of low variance
    w   = prod_t w_t               of its whole sequence: unbiased

`weight` multiplies the surrogate of a token by w, brought to [`weight_floor`, `weight_cap`], and with
`weight_normalized` divided by its mean over the mini-batch (`WeightMean`). `mask` leaves tokens out
by a measure of theirs (`mask_by`), whole sequences by its sum, mean or largest value, or turns by its mean:

    ratio       log w_t: its sum stands for the product, and its mean for the geometric mean
    k2          (log w_t)^2 / 2
    k3          w_t - 1 - log w_t, whose mean estimates KL(q, p_old)
    error       max(w_t, 1 / w_t), by how much the two differ as a factor (NeMo-RL's multiplicative probability error)
    binary_kl   max of KL(p_old, q) and KL(q, p_old) of "this token" against "any other" (KPop of AReaL)

or by their second moment over the mini-batch (`SecondMomentMask`). Besides, p_old,t - q_t, put together in the same
way, may have to be in [`difference_below`, `difference_above`]. `veto_below` leaves out the
sequences that have a token with a smaller w_t.

    TIS        weight=token, weight_cap=C               truncated (Yao et al. 2025, "Off-policy RL training")
    MIS        weight, mask_above=C, mask_below=0       masked (Liu et al. 2025, "When Speed Kills Stability")
    IcePop     weight=token, mask=token, in [0.5, 5]    Ling team 2025 (arXiv 2510.18855)
    M2PO       weight=token, mask=second_moment         Zheng et al. 2025 (arXiv 2510.01161)
    decoupled  weight=token                             the objective of AReaL (Fu et al. 2025, arXiv 2505.24298):
                                                        sg(p_old / q) min(r A, clip(r) A) with r = p / p_old

Tokens that are left out cost nothing. They still count in the loss's divisor, so the others' weights do not change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from fivefold.algorithms.batch_steps import BatchStep, Gather, StepsInTurn
from fivefold.algorithms.imitation import policy_mask
from fivefold.algorithms.kl import bounded_exp, kl_estimate
from fivefold.algorithms.loss import Sums
from fivefold.algorithms.metrics import Metric, Metrics
from fivefold.algorithms.sequences import Sequences
from fivefold.algorithms.token_sums import count, means
from fivefold.batch import Batch
from fivefold.config.algorithms import CORRECTIONS
from fivefold.config.schema.corrections import RolloutCorrectionConfig

Mask = Literal["token", "turn", "sequence", "geometric", "largest", "second_moment"]
MaskBy = Literal["ratio", "k2", "k3", "error", "binary_kl"]
SMALLEST = 1e-8
"""Least probability of "any other" token in a logarithm."""
KEPT_TOKENS = "second_moment_kept"
"""Name of the field that is 1 on the tokens that are kept, else 0."""
WEIGHT_MEAN = "weight_mean"
"""Name of the field with the mean by which weights are divided, the same on all tokens."""
LEAST_MEAN = 1e-8
"""Mean up to which weights are not divided by it."""


class Corrected(NamedTuple):
    """What a correction makes of T tokens."""

    weights_T: torch.Tensor
    """Factor of each token's surrogate; 0 on tokens that are left out."""
    kept_T: torch.Tensor
    """bool [T]: whether the token is trained and not left out."""
    cut_T: torch.Tensor
    """bool [T]: whether the token is trained, and its weight was truncated or it was left out."""
    metrics: Metrics


@dataclass(frozen=True)
class RolloutCorrection:
    """Weights and masks, as at the top of this file."""

    weight: Literal["token", "sequence"] | None = None
    weight_cap: float | None = None
    mask: Mask | None = None
    mask_above: float | None = None
    mask_below: float | None = None
    veto_below: float | None = None
    mask_by: MaskBy = "ratio"
    weight_floor: float | None = None
    difference_above: float | None = None
    difference_below: float | None = None
    weight_normalized: bool = False

    @staticmethod
    def automatic() -> RolloutCorrection:
        """Return what `actor.rollout_correction.method: auto` corrects with once it does: TIS by token."""
        return RolloutCorrection(**CORRECTIONS["tis"].keys)

    @staticmethod
    def of(config: RolloutCorrectionConfig) -> RolloutCorrection | None:
        """Return the correction that a recipe asks for from the first step on; None: it asks for none."""
        if not config.is_fixed:
            return None
        below = config.mask_below
        if below is None and config.mask_above is not None and config.has_lower_bound:
            below = 1.0 / config.mask_above
        return RolloutCorrection(
            config.weight,
            config.weight_cap,
            config.mask,
            config.mask_above,
            below,
            config.veto_below,
            config.mask_by,
            config.weight_floor,
            config.difference_above,
            config.difference_below,
            config.weight_normalized,
        )

    @property
    def before(self) -> BatchStep | None:
        """What is computed over a whole mini-batch first; None: nothing."""
        steps: list[BatchStep] = []
        if self.mask == "second_moment" and self.mask_above is not None:
            steps.append(SecondMomentMask(self.mask_above))
        if self.weight_normalized:
            steps.append(WeightMean(self))
        return StepsInTurn(tuple(steps)) if len(steps) > 1 else next(iter(steps), None)

    def __call__(
        self, old_T: torch.Tensor, rollout_T: torch.Tensor, sequences: Sequences, fields: Mapping[str, torch.Tensor]
    ) -> Corrected:
        """Compute weights and masks, without gradient.

        Args:
            old_T: log p_old, 0 on tokens that are not trained.
            rollout_T: log q, the same.
            sequences: whole sequences.
            fields: the batch's fields, with what `before` has added.
        """
        log_w_T = (old_T - rollout_T).detach()
        trained_T = sequences.mask_T.bool()
        kept_T = trained_T & self._inside(log_w_T, rollout_T, sequences, fields)
        weights_T, is_truncated_T = self.weights(log_w_T, sequences)
        if self.weight_normalized:
            weights_T = weights_T / fields[WEIGHT_MEAN]
        weights_T = torch.where(kept_T, weights_T, torch.zeros_like(weights_T))
        sums: Sums = {
            "correction/truncated": count(is_truncated_T & kept_T, weights_T),
            "correction/masked": count(trained_T & ~kept_T, weights_T),
            "correction/weight": weights_T.sum(),
            "correction/ess": Metric(weights_T.sum(), trained_T.sum(), "ess", weights_T.square().sum()),
        }
        return Corrected(weights_T, kept_T, trained_T & (is_truncated_T | ~kept_T), means(sums, trained_T))

    def weights(self, log_w_T: torch.Tensor, sequences: Sequences) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weight of each token before it is normalised, and bool [T]: whether it was truncated."""
        if self.weight is None:
            return torch.ones_like(log_w_T), torch.zeros_like(log_w_T, dtype=torch.bool)
        if self.weight == "sequence":
            log_w_T = sequences.spread(sequences.sum(log_w_T))
        least, most = _log(self.weight_floor, -math.inf), _log(self.weight_cap, math.inf)
        return bounded_exp(log_w_T.clamp(least, most)), (log_w_T > most) | (log_w_T < least)

    def _inside(
        self, log_w_T: torch.Tensor, rollout_T: torch.Tensor, sequences: Sequences, fields: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        inside_T = torch.ones_like(log_w_T, dtype=torch.bool)
        if self.mask == "second_moment":
            inside_T = fields[KEPT_TOKENS].bool()
        elif self.mask is not None:
            inside_T = self._within_bounds(self._measured(log_w_T, rollout_T), sequences)
            if (self.difference_above, self.difference_below) != (None, None):
                inside_T = inside_T & self._differs_little(log_w_T, rollout_T, sequences)
        if self.veto_below is not None:
            below_T = (log_w_T < math.log(self.veto_below)).to(log_w_T.dtype)
            inside_T = inside_T & (sequences.spread(sequences.sum(below_T)) == 0)
        return inside_T

    def _measured(self, log_w_T: torch.Tensor, rollout_T: torch.Tensor) -> torch.Tensor:
        """Return the measure of each token."""
        zero_T = torch.zeros_like(log_w_T)
        match self.mask_by:
            case "ratio":
                return log_w_T
            case "k2" | "k3":
                return kl_estimate(zero_T, log_w_T, self.mask_by)
            case "error":
                return bounded_exp(log_w_T.abs())
            case "binary_kl":
                q_T, p_T = (
                    logs_T.detach().exp().clamp(SMALLEST, 1.0 - SMALLEST) for logs_T in (rollout_T, rollout_T + log_w_T)
                )
                odds_T = (p_T / q_T).log(), ((1.0 - p_T) / (1.0 - q_T)).log()
                forward_T = p_T * odds_T[0] + (1.0 - p_T) * odds_T[1]
                return torch.maximum(forward_T, -q_T * odds_T[0] - (1.0 - q_T) * odds_T[1])

    def _put_together(self, measure_T: torch.Tensor, sequences: Sequences) -> torch.Tensor:
        """Return the sum, mean or largest value of the token's sequence, or the mean of its turn; or each token's."""
        spans = sequences.turns() if self.mask == "turn" else sequences
        of_spans = {"sequence": spans.sum, "geometric": spans.mean, "turn": spans.mean, "largest": spans.largest}
        if self.mask is None or self.mask not in of_spans:
            return measure_T
        return spans.spread(of_spans[self.mask](measure_T))

    def _differs_little(self, log_w_T: torch.Tensor, rollout_T: torch.Tensor, sequences: Sequences) -> torch.Tensor:
        difference_T = (rollout_T + log_w_T).detach().exp() - rollout_T.detach().exp()
        difference_T = self._put_together(difference_T, sequences)
        below, above = self.difference_below, self.difference_above
        least, most = -math.inf if below is None else below, math.inf if above is None else above
        return (difference_T >= least) & (difference_T <= most)

    def _within_bounds(self, measure_T: torch.Tensor, sequences: Sequences) -> torch.Tensor:
        measure_T = self._put_together(measure_T, sequences)
        below, above = self.mask_below, self.mask_above
        if self.mask_by == "ratio":
            return (measure_T >= _log(below, -math.inf)) & (measure_T <= _log(above, math.inf))
        return measure_T <= (math.inf if above is None else above)


def _log(bound: float | None, otherwise: float) -> float:
    if bound is None:
        return otherwise
    return math.log(bound) if bound > 0 else -math.inf


@dataclass(frozen=True)
class SecondMomentMask:
    """M2PO's mask: leaves out the tokens with the largest importance weights until their second moment is small.

    Second-moment trust policy optimisation (Zheng et al. 2025, arXiv 2510.01161) bounds, over all trained tokens of a
    mini-batch that are kept,

        M2 = mean over kept tokens of (log w_t)^2 <= bound          w_t = p_old,t / q_t

    by leaving out as few tokens as possible, those with the largest (log w_t)^2. A sum of log w_t would cancel where
    some are above 0 and others below; their squares do not.
    """

    bound: float
    """Largest second moment of the kept tokens."""

    def __call__(self, batch: Batch, gather: Gather) -> Batch:
        """Return `batch` with the field `second_moment_kept`.

        Fields read: `old_logprobs` and `rollout_logprobs`.
        """
        trained_T = policy_mask(batch).bool()
        log_w_T = batch.fields["old_logprobs"].double() - batch.fields["rollout_logprobs"].double()
        square_T = torch.where(trained_T, log_w_T, torch.zeros_like(log_w_T)).square()
        most = largest_kept(torch.cat(gather(square_T[trained_T])), self.bound)
        return batch.with_fields(**{KEPT_TOKENS: (trained_T & (square_T <= most)).to(batch.mask_T.dtype)})


@dataclass(frozen=True)
class WeightMean:
    """Finds the mean over a mini-batch of the weights of tokens, or of sequences if `weight` is `sequence`."""

    correction: RolloutCorrection

    def __call__(self, batch: Batch, gather: Gather) -> Batch:
        """Return `batch` with the field `weight_mean`.

        Fields read: `old_logprobs` and `rollout_logprobs`.
        """
        mask_T = policy_mask(batch)
        sequences, trained_T = Sequences.of(mask_T, batch.lengths), mask_T.bool()
        log_w_T = batch.fields["old_logprobs"].double() - batch.fields["rollout_logprobs"].double()
        weights_T, _ = self.correction.weights(torch.where(trained_T, log_w_T, torch.zeros_like(log_w_T)), sequences)
        if self.correction.weight == "sequence":
            # Each trained token of a sequence has its weight.
            own = torch.stack([sequences.mean(weights_T).sum(), (sequences.counts_S > 0).double().sum()])
        else:
            own = torch.stack([(weights_T * trained_T).sum(), trained_T.double().sum()])
        total, n = torch.stack(gather(own)).sum(0).tolist()
        mean = total / n if n and total / n > LEAST_MEAN else 1.0
        return batch.with_fields(**{WEIGHT_MEAN: torch.full_like(batch.mask_T, mean)})


def largest_kept(squares_N: torch.Tensor, bound: float) -> float:
    """Return the largest value that is kept, so that the mean of those up to it is at most `bound`; -inf: none is kept.

    Equal values are kept or left out together, so that the choice does not depend on their order.
    """
    ascending_N = squares_N.sort().values
    counts_N = torch.arange(1, len(ascending_N) + 1, device=squares_N.device)
    n_kept = int((ascending_N.cumsum(0) / counts_N <= bound).sum())
    if n_kept == 0:
        return -math.inf
    if n_kept < len(ascending_N) and ascending_N[n_kept] == ascending_N[n_kept - 1]:
        smaller_N = ascending_N[ascending_N < ascending_N[n_kept]]
        return float(smaller_N[-1]) if len(smaller_N) else -math.inf
    return float(ascending_N[n_kept - 1])
