"""The loss of a policy: a surrogate, corrected for the rollout engine, minus an entropy bonus, plus a KL penalty."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fivefold.algorithms import ages, terms
from fivefold.algorithms.batch_steps import BatchStep, StepsInTurn
from fivefold.algorithms.corrections import RolloutCorrection
from fivefold.algorithms.distillation import Distillation
from fivefold.algorithms.imitation import Imitation
from fivefold.algorithms.kl import KLEstimator, bounded_exp, kl_estimate
from fivefold.algorithms.loss import Aggregation, LossInputs, Sums, Surrogate
from fivefold.algorithms.metrics import Metric, Metrics
from fivefold.algorithms.sample_weights import SAMPLE_WEIGHT
from fivefold.algorithms.sequences import PolicyTokens, Sequences
from fivefold.algorithms.token_sums import divisor, largest, means, token_weights, zero_unless
from fivefold.batch import Totals

_POLICY_FIELDS = frozenset({"advantages", "old_logprobs", "rollout_logprobs", "ref_logprobs"})


@dataclass(frozen=True)
class PolicyLoss:
    """A policy's loss, aggregated over a mini-batch as `fivefold/algorithms/loss.py` says. A token costs

        cost = weight * surrogate - entropy_coeff * entropy + kl_coeff * KL(p, p_ref) + distillation.coeff * D

    where the weight comes from the rollout correction, or is 1, and tokens that the correction leaves out cost nothing.
    Where the batch has the field `sample_weight`, the surrogate is multiplied by it (`sample_weights.py`).
    With `opsm_delta`, the surrogate is 0 in sequences of a negative advantage whose mean of log p_old - log p is larger
    (off-policy sequence masking: DeepSeek-AI 2025, arXiv 2512.02556, section 3.1). With `kl_unbiased`, KL is multiplied
    by r, with gradient (the same section): it then has the gradient of the divergence, whatever sampled the tokens.

    Without an `old_logprobs` field the batch is on-policy: p_old is p without its gradient, so that r = p / p_old is 1
    and PPO's gradient is the plain policy gradient -A grad log p. The correction's weights p_old / q then still compare
    the trainer with the rollout.

    Fields read: `advantages`; `old_logprobs` and `rollout_logprobs` where present; `rollout_logprobs` is required with
    `old_is_rollout` or a correction, `ref_logprobs` with `kl_coeff` > 0, `versions` with a `version`, and
    `teacher_logprobs` if the policy is distilled over sampled tokens. Over more tokens, D is the prediction
    `divergence` of the head.
    """

    temperature: float
    surrogate: Surrogate
    aggregation: Aggregation = "token_mean"
    length: int = 1
    """Tokens by which the aggregation `sequence_sum_fixed` divides."""
    entropy_coeff: float = 0.0
    entropy_most: float | None = None
    """Entropy in nats above which a token has no more bonus; None: any has."""
    kl_coeff: float = 0.0
    kl_estimator: KLEstimator = "k3"
    correction: RolloutCorrection | None = None
    old_is_rollout: bool = False
    """Whether `rollout_logprobs` are p_old (`recompute_logprob: false`)."""
    rollout_is_truncated: bool = False
    """Whether `rollout_logprobs` are of a truncated distribution, so that a comparison with the trainer's is void."""
    distillation: Distillation | None = None
    """How the policy is drawn towards a teacher (`fivefold/algorithms/distillation.py`)."""
    opsm_delta: float | None = None
    """Largest mean of log p_old - log p, in nats a token, of a sequence with a negative advantage; None: any."""
    kl_unbiased: bool = False
    """Whether KL is weighted by p / p_old."""
    kl_clip: float | None = None
    """Largest estimate of a token's KL in the loss, in nats; None: any."""
    version: int | None = None
    """Version of the weights before the step, from which the ages of tokens count; None: all tokens are of it."""
    max_age: int = 0
    """Largest age that a token may have."""
    old_is_interpolated: bool = False
    """Whether p_old lies between `rollout_logprobs` and p, as the ages say (`fivefold/algorithms/ages.py`)."""
    imitation: Imitation | None = None
    """How the likelihood of given responses is a further term (`fivefold/algorithms/imitation.py`)."""

    @property
    def before(self) -> BatchStep | None:
        """What surrogate and correction compute over a whole mini-batch first, from the field `old_logprobs`."""
        correction = None if self.correction is None else self.correction.before
        steps = [step for step in (getattr(self.surrogate, "before", None), correction) if step is not None]
        return StepsInTurn(tuple(steps)) if steps else None

    @property
    def divergence(self) -> Distillation | None:
        """How the divergence is taken that the head is to predict; None: it need not."""
        over_several = self.distillation is not None and self.distillation.over != "sampled"
        return self.distillation if over_several else None

    @property
    def entropy_gradient(self) -> bool:
        return self.entropy_coeff != 0.0

    def normalizer(self, totals: Totals) -> float:
        return divisor(totals, self.aggregation, self.length)

    def __call__(self, inputs: LossInputs) -> tuple[torch.Tensor, Metrics]:
        return self._of_policy(inputs) if self.imitation is None else self.imitation(inputs, self._of_policy)

    def _of_policy(self, inputs: LossInputs) -> tuple[torch.Tensor, Metrics]:
        trained_T = inputs.mask_T.bool()
        # Values of masked tokens may be -inf or NaN.
        logprobs_T, entropy_T = (zero_unless(trained_T, inputs.predictions[name]) for name in ("logprobs", "entropy"))
        present = inputs.fields.keys() & _POLICY_FIELDS
        fields = {name: zero_unless(trained_T, inputs.fields[name]) for name in present}
        age_T = torch.zeros_like(trained_T) if self.version is None else self.version - inputs.fields["versions"]
        old_T = self._old_logprobs(fields, logprobs_T.detach(), age_T)
        advantages_T = fields["advantages"]
        of_teacher: Sums = {}
        if self.distillation is not None and self.divergence is None:
            closer_T = terms.closeness(self.distillation, inputs.fields, old_T, trained_T)
            advantages_T = advantages_T + self.distillation.coeff * closer_T
            of_teacher = {"teacher_kl": -closer_T.sum()}
        tokens = PolicyTokens(
            logprobs_T, old_T, advantages_T, Sequences.of(inputs.mask_T, inputs.lengths), inputs.fields
        )
        cost_T, of_surrogate = self._surrogate_cost(tokens)
        sums = {
            **of_teacher,
            **of_surrogate,
            "entropy": entropy_T.detach().sum(),
            **entropy_by_part(entropy_T.detach(), tokens.sequences),
            **ratio_metrics(tokens),
        }
        # Old log-probs that are the rollout's own show no mismatch. Current ones do, exactly on the first update.
        trainer_T = logprobs_T.detach() if self.old_is_rollout else old_T
        measured_T = logprobs_T.detach() if self.old_is_interpolated else trainer_T
        compares = "rollout_logprobs" in fields and not self.rollout_is_truncated
        if compares:
            sums |= mismatch_metrics(measured_T, fields["rollout_logprobs"], trained_T)
        kept_T, cut_T = trained_T, ~trained_T
        if self.correction is not None:
            corrected = self.correction(trainer_T, fields["rollout_logprobs"], tokens.sequences, inputs.fields)
            cost_T, kept_T, cut_T = corrected.weights_T * cost_T, corrected.kept_T, corrected.cut_T
            sums |= corrected.metrics
        if compares and self.version is not None:
            rollout_T = fields["rollout_logprobs"]
            sums |= ages.metrics_by_age(measured_T, rollout_T, cut_T, age_T, trained_T, self.max_age)
        cost_T, of_terms = self._with_terms(cost_T, entropy_T, tokens, fields, inputs.predictions)
        weights_T = token_weights(inputs.mask_T, inputs.lengths, self.aggregation)
        return (zero_unless(kept_T, cost_T) * weights_T).sum(), means({**sums, **of_terms}, trained_T)

    def _old_logprobs(
        self, fields: Mapping[str, torch.Tensor], current_T: torch.Tensor, age_T: torch.Tensor
    ) -> torch.Tensor:
        if self.old_is_interpolated:
            return ages.interpolated(fields["rollout_logprobs"], current_T, age_T)
        return fields["rollout_logprobs"] if self.old_is_rollout else fields.get("old_logprobs", current_T)

    def _surrogate_cost(self, tokens: PolicyTokens) -> tuple[torch.Tensor, Sums]:
        """Return the surrogate's cost of each token, with the weights of samples and without drifted sequences."""
        cost_T, sums = self.surrogate(tokens)
        if SAMPLE_WEIGHT in tokens.fields:
            cost_T = cost_T * zero_unless(tokens.trained_T, tokens.fields[SAMPLE_WEIGHT])
        if self.opsm_delta is not None:
            cost_T, masked = terms.without_drifted(cost_T, tokens, self.opsm_delta)
            sums = {**sums, **masked}
        return cost_T, {**sums, "policy_loss": zero_unless(tokens.trained_T, cost_T.detach()).sum()}

    def _with_terms(
        self,
        cost_T: torch.Tensor,
        entropy_T: torch.Tensor,
        tokens: PolicyTokens,
        fields: Mapping[str, torch.Tensor],
        predictions: Mapping[str, torch.Tensor],
    ) -> tuple[torch.Tensor, Sums]:
        """Return the costs with the entropy bonus, the KL penalty and the divergence from a teacher."""
        sums: Sums = {}
        if self.entropy_gradient:
            # Clamped, an entropy above has no gradient.
            bonus_T = entropy_T if self.entropy_most is None else entropy_T.clamp(max=self.entropy_most)
            cost_T = cost_T - self.entropy_coeff * bonus_T
        if "ref_logprobs" in fields or self.kl_coeff:
            cost_T, sums = terms.with_kl(
                cost_T,
                tokens,
                fields,
                self.kl_coeff,
                self.kl_estimator,
                unbiased=self.kl_unbiased,
                clip=self.kl_clip,
            )
        if self.divergence is not None:
            divergence_T = zero_unless(tokens.trained_T, predictions["divergence"])
            cost_T = cost_T + self.divergence.coeff * divergence_T
            sums = {**sums, "teacher_kl": divergence_T.detach().sum()}
        return cost_T, sums


N_PARTS = 4
"""Parts of equal length into which the trained tokens of a sequence are divided."""
PART = "entropy_quarter"
"""Name of the mean entropy in a part, before `/<i>`, which counts from 1."""


def parts(sequences: Sequences) -> torch.Tensor:
    """Return int64 [T]: floor(4 i / n) for trained token i of n of its sequence, counted from 0; else any part."""
    counts_S = sequences.counts_S
    before_S = counts_S.cumsum(0) - counts_S
    place_T = sequences.mask_T.cumsum(0) - 1 - sequences.spread(before_S)
    part_T = (N_PARTS * place_T / sequences.spread(counts_S).clamp(min=1)).floor()
    return part_T.clamp(0, N_PARTS - 1).long()


def entropy_by_part(entropy_T: torch.Tensor, sequences: Sequences) -> Metrics:
    """Return the mean entropy of the trained tokens in each part i, `entropy_quarter/<i>`."""
    part_T, trained_T = parts(sequences), sequences.mask_T.bool()
    metrics: Metrics = {}
    for number in range(N_PARTS):
        is_in_T = trained_T & (part_T == number)
        metrics[f"{PART}/{number + 1}"] = Metric(zero_unless(is_in_T, entropy_T).sum(), is_in_T.sum())
    return metrics


def ratio_metrics(tokens: PolicyTokens) -> Sums:
    """Measure how far the policy has moved from the old one."""
    log_ratio_T = tokens.log_ratio_T.detach()
    ratio_T = bounded_exp(log_ratio_T)
    return {
        "ppo_kl": (-log_ratio_T).sum(),
        "ppo_kl_k3": kl_estimate(torch.zeros_like(log_ratio_T), log_ratio_T, "k3").sum(),
        "ratio": zero_unless(tokens.trained_T, ratio_T).sum(),
        "ratio/max": largest(ratio_T, tokens.trained_T),
    }


def mismatch_metrics(trainer_T: torch.Tensor, rollout_T: torch.Tensor, trained_T: torch.Tensor) -> Metrics:
    """Measure how far the trainer's log-probs are from the rollout engine's, at the same weights.

    Args:
        trainer_T, rollout_T: [T], zero where not trained.
        trained_T: bool [T].

    Returns:
        Over the tokens that have a log-prob of the rollout (the others are NaN in `rollout_T`), with d = trainer -
        rollout and w = exp(d): |d|; the estimates w - 1 - d of KL(rollout, trainer) and w d - (w - 1) of KL(trainer,
        rollout), both never negative; w and its effective sample size; the largest |d| and w; and the
        share of these tokens among the trained ones.
    """
    known_T = trained_T & ~rollout_T.isnan()
    log_w_T = (trainer_T - torch.where(known_T, rollout_T, trainer_T)).detach()
    log_w_T = torch.where(known_T, log_w_T, torch.zeros_like(log_w_T))
    w_T = bounded_exp(log_w_T)
    zero_T = torch.zeros_like(w_T)
    one_T = known_T.to(w_T.dtype)
    sums: Sums = {
        "rollout_mismatch": log_w_T.abs().sum(),
        "rollout_mismatch/max": largest(log_w_T.abs(), known_T),
        "rollout_mismatch_kl": kl_estimate(zero_T, log_w_T, "k3").sum(),
        # w (log w - 1 + 1/w) in terms of k3 with the sign of d changed, which keeps the digits near w = 1.
        "rollout_mismatch_kl_reverse": (w_T * kl_estimate(zero_T, -log_w_T, "k3")).sum(),
        "rollout_mismatch_share": Metric(one_T.sum(), trained_T.sum()),
        "rollout_ratio": (w_T * one_T).sum(),
        "rollout_ratio/max": largest(w_T, known_T),
        "rollout_ess": Metric((w_T * one_T).sum(), one_T.sum(), "ess", (w_T.square() * one_T).sum()),
    }
    return means(sums, known_T)
