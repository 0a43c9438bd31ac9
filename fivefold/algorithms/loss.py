"""Losses: per-token tensors of one micro-batch in, a *sum* and sums of metrics out.

The engine alone divides by `Loss.normalizer` of the whole mini-batch. A sequence's share of the loss never depends
on the sequences beside it, so the gradient is the same however the mini-batch is split, packed and laid out:

    sum over micro-batches of loss(micro-batch) / normalizer(mini-batch)  ==  loss(mini-batch) / normalizer(mini-batch)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from fivefold.algorithms.kl import KLEstimator, bounded_exp, kl_estimate
from fivefold.config.schema import ActorConfig, GenerationConfig
from fivefold.types import Totals

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum"]
Metrics = dict[str, torch.Tensor]

_POLICY_FIELDS = frozenset({"advantages", "old_logprobs", "rollout_logprobs", "ref_logprobs"})


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch of whole sequences, laid end to end; it may be empty (T = 0)."""

    predictions: Mapping[str, torch.Tensor]
    """float32 [T] each, by name: the predictions of the model's head under the current weights.

    A policy's head gives `logprobs`, log p(token) at the loss's temperature, with gradient; and `entropy` of the
    distribution that predicts the token, with gradient if the loss asks for it.
    """
    mask_T: torch.Tensor
    """float32 [T]: 1 on trained tokens, else 0. All other values of a token whose mask is 0 are ignored, even NaN."""
    lengths: tuple[int, ...]
    """Tokens of each sequence; they sum to T."""
    fields: Mapping[str, torch.Tensor]
    """[T, ...] each, by name: the batch's per-token fields."""


class Loss(Protocol):
    """What an engine minimises."""

    @property
    def temperature(self) -> float:
        """Temperature that divides the logits."""

    @property
    def entropy_gradient(self) -> bool:
        """Whether the entropy must carry a gradient."""

    def normalizer(self, totals: Totals) -> float:
        """Return the divisor, at least 1, of the sum over a whole mini-batch of these sizes."""

    def __call__(self, inputs: LossInputs) -> tuple[torch.Tensor, Metrics]:
        """Return the loss's sum (scalar, with gradient) and the metrics' sums over trained tokens (without).

        Metrics are divided by the global number of trained tokens, except names that end in `/max` or `/min`:
        those are reduced by maximum or minimum (a micro-batch without trained tokens gives -inf or +inf).
        """


@dataclass(frozen=True)
class PolicyLoss:
    """PPO's clipped surrogate with its relatives' options, minus an entropy bonus, plus a KL penalty.

    With ratio r = exp(log p - log p_old), advantage A, clip range [1 - low, 1 + high] and dual clip c, a token costs

        surrogate = max(-A r, -A clip(r, 1 - low, 1 + high))       PPO (Schulman et al. 2017, eq. 7)
        surrogate = min(surrogate, -A c)          where A < 0      dual clip (Ye et al. 2020, eq. 5)
        cost      = surrogate - entropy_coeff * entropy + kl_coeff * KL(p || p_ref)

    `high` above `low` is DAPO's clip-higher (Yu et al. 2025, eq. 10). Without an `old_logprobs` field the batch is
    on-policy: p_old is p without its gradient, so r = 1 and the gradient is the plain policy gradient -A grad log p.

    The costs are aggregated over a mini-batch of sequences s as

        token_mean      sum_s sum_t cost / number of trained tokens                         DAPO, eq. 8
        sequence_mean   sum_s (mean_t cost) / number of sequences with trained tokens       GRPO (Shao et al. 2024)
        sequence_sum    sum_s (sum_t cost) / number of sequences with trained tokens        Dr. GRPO (Liu et al. 2025)

    Fields read: `advantages`; `old_logprobs` and `rollout_logprobs` where present; `rollout_logprobs` is required with
    `old_is_rollout`, and `ref_logprobs` with `kl_coeff` > 0.
    """

    temperature: float
    clip_low: float
    clip_high: float
    dual_clip: float | None
    aggregation: Aggregation
    entropy_coeff: float
    kl_coeff: float
    kl_estimator: KLEstimator
    old_is_rollout: bool = False
    """Whether `rollout_logprobs` are p_old (`recompute_logprob: false`)."""
    rollout_is_truncated: bool = False
    """Whether `rollout_logprobs` are of a truncated distribution, so that a comparison with the trainer's is void."""

    @classmethod
    def from_config(cls, config: ActorConfig, sampling: GenerationConfig) -> PolicyLoss:
        """Return the loss of a recipe's actor on completions that are sampled with `sampling`."""
        return cls(
            temperature=sampling.temperature,
            clip_low=config.eps_clip,
            clip_high=config.eps_clip if config.eps_clip_higher is None else config.eps_clip_higher,
            dual_clip=config.c_clip,
            aggregation=config.loss_aggregation,
            entropy_coeff=config.entropy_coeff,
            kl_coeff=config.kl_ctl if config.kl_in == "loss" else 0.0,
            kl_estimator=config.kl_estimator,
            old_is_rollout=config.recompute_logprob is False,
            rollout_is_truncated=sampling.truncates_distribution,
        )

    @property
    def entropy_gradient(self) -> bool:
        return self.entropy_coeff != 0.0

    def normalizer(self, totals: Totals) -> float:
        if self.aggregation == "token_mean":
            return float(max(1, totals.n_trained_tokens))
        return float(max(1, totals.n_trained_sequences))

    def __call__(self, inputs: LossInputs) -> tuple[torch.Tensor, Metrics]:
        trained_T = inputs.mask_T.bool()
        # Values of masked tokens may be -inf or NaN, and 0 * NaN is NaN, in the sum and in the gradient.
        logprobs_T = _zero_unless(trained_T, inputs.predictions["logprobs"])
        entropy_T = _zero_unless(trained_T, inputs.predictions["entropy"])
        present = inputs.fields.keys() & _POLICY_FIELDS
        fields = {name: _zero_unless(trained_T, inputs.fields[name]) for name in present}
        if self.old_is_rollout:
            old_logprobs_T = fields["rollout_logprobs"]
        else:
            old_logprobs_T = fields.get("old_logprobs", logprobs_T.detach())

        log_ratio_T = logprobs_T - old_logprobs_T
        surrogate_T = self._surrogate(bounded_exp(log_ratio_T), fields["advantages"])
        metrics = {"policy_loss": surrogate_T.detach().sum(), "entropy": entropy_T.detach().sum()}
        metrics |= self._ratio_metrics(log_ratio_T.detach(), fields["advantages"], trained_T)
        if "rollout_logprobs" in fields and not self.rollout_is_truncated:
            # Old log-probs that are the rollout's own show no mismatch. Current ones do, exactly on the first update.
            trainer_T = logprobs_T.detach() if self.old_is_rollout else old_logprobs_T
            metrics |= mismatch_metrics(trainer_T, fields["rollout_logprobs"], trained_T)

        cost_T = surrogate_T
        if self.entropy_gradient:
            cost_T = cost_T - self.entropy_coeff * entropy_T
        if "ref_logprobs" in fields:
            kl_T = kl_estimate(logprobs_T, fields["ref_logprobs"], self.kl_estimator)
            metrics["kl_ref"] = kl_T.detach().sum()
            cost_T = cost_T + self.kl_coeff * kl_T if self.kl_coeff else cost_T
        elif self.kl_coeff:
            raise ValueError(
                f"the loss has a KL penalty (actor.kl_ctl={self.kl_coeff}), but the batch has no `ref_logprobs` field "
                f"(it has {sorted(fields)}): compute the reference's log-probs, or set actor.kl_ctl=0"
            )
        return (cost_T * token_weights(inputs.mask_T, inputs.lengths, self.aggregation)).sum(), metrics

    def _surrogate(self, ratio_T: torch.Tensor, advantages_T: torch.Tensor) -> torch.Tensor:
        clipped_T = ratio_T.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        surrogate_T = torch.maximum(-advantages_T * ratio_T, -advantages_T * clipped_T)
        if self.dual_clip is None:
            return surrogate_T
        bounded_T = torch.minimum(surrogate_T, -advantages_T * self.dual_clip)
        return torch.where(advantages_T < 0, bounded_T, surrogate_T)

    def _ratio_metrics(self, log_ratio_T: torch.Tensor, advantages_T: torch.Tensor, trained_T: torch.Tensor) -> Metrics:
        """Measure how far the policy has moved, and on how many tokens a clip stops the gradient."""
        ratio_T = bounded_exp(log_ratio_T)
        lower_T = (ratio_T < 1.0 - self.clip_low) & (advantages_T < 0)
        upper_T = (ratio_T > 1.0 + self.clip_high) & (advantages_T > 0)
        clipped = {"clip_fraction": lower_T | upper_T, "clip_fraction_lower": lower_T, "clip_fraction_upper": upper_T}
        if self.dual_clip is not None:
            clipped["clip_fraction_dual"] = (ratio_T > self.dual_clip) & (advantages_T < 0)
            clipped["clip_fraction"] = clipped["clip_fraction"] | clipped["clip_fraction_dual"]
        zero_T = torch.zeros_like(log_ratio_T)
        return {name: where_T.to(ratio_T.dtype).sum() for name, where_T in clipped.items()} | {
            "ppo_kl": (-log_ratio_T).sum(),
            "ppo_kl_k3": kl_estimate(zero_T, log_ratio_T, "k3").sum(),
            "ratio": _zero_unless(trained_T, ratio_T).sum(),
            "ratio/max": _max(ratio_T, trained_T),
        }


@dataclass(frozen=True)
class SFTLoss:
    """Negative log-likelihood of the trained tokens, averaged over the tokens of the mini-batch."""

    temperature: float = 1.0
    entropy_gradient: bool = False

    def normalizer(self, totals: Totals) -> float:
        return float(max(1, totals.n_trained_tokens))

    def __call__(self, inputs: LossInputs) -> tuple[torch.Tensor, Metrics]:
        trained_T = inputs.mask_T.bool()
        nll = -_zero_unless(trained_T, inputs.predictions["logprobs"]).sum()
        entropy = _zero_unless(trained_T, inputs.predictions["entropy"].detach()).sum()
        return nll, {"nll": nll.detach(), "entropy": entropy}


def token_weights(mask_T: torch.Tensor, lengths: tuple[int, ...], aggregation: Aggregation) -> torch.Tensor:
    """Return the factor of each token's cost in the sum: the mask, with `sequence_mean` divided by its sequence's sum.

    Args:
        mask_T: [T], 1 on trained tokens, else 0.
        lengths: tokens of each sequence; they sum to T.
        aggregation: as in `PolicyLoss`.

    Returns:
        [T], in the mask's dtype.
    """
    if aggregation != "sequence_mean":
        return mask_T
    lengths_S = torch.tensor(lengths, dtype=torch.int64, device=mask_T.device)
    sequence_T = torch.repeat_interleave(
        torch.arange(len(lengths), device=mask_T.device), lengths_S, output_size=mask_T.numel()
    )
    counts_S = mask_T.new_zeros(len(lengths)).index_add_(0, sequence_T, mask_T)
    return mask_T / counts_S.clamp(min=1)[sequence_T]


def mismatch_metrics(trainer_T: torch.Tensor, rollout_T: torch.Tensor, trained_T: torch.Tensor) -> Metrics:
    """Measure how far the trainer's log-probs are from those of the rollout engine, at the same weights.

    Args:
        trainer_T, rollout_T: [T], zero where not trained.
        trained_T: bool [T].

    Returns:
        Sums of |trainer - rollout| and of the k3 estimate of KL(rollout || trainer), the largest |difference|, and the
        number of tokens that have a log-prob of the rollout. The others are NaN in `rollout_T`, and are left out.
    """
    known_T = trained_T & ~rollout_T.isnan()
    rollout_T = torch.where(known_T, rollout_T, trainer_T.detach())
    difference_T = (trainer_T - rollout_T).detach().abs()
    return {
        "rollout_mismatch": difference_T.sum(),
        "rollout_mismatch/max": _max(difference_T, known_T),
        "rollout_mismatch_kl": kl_estimate(rollout_T, trainer_T.detach(), "k3").sum(),
        "rollout_mismatch_share": known_T.to(difference_T.dtype).sum(),
    }


def _zero_unless(trained_T: torch.Tensor, values_T: torch.Tensor) -> torch.Tensor:
    return torch.where(trained_T, values_T, torch.zeros_like(values_T))


def _max(values_T: torch.Tensor, trained_T: torch.Tensor) -> torch.Tensor:
    """Return the largest trained value; -inf, the identity of the maximum, if there is none."""
    # Indexing with the mask would wait for the device, which alone knows the number of trained tokens.
    lowest = values_T.new_full((1,), -torch.inf)
    return torch.cat([torch.where(trained_T, values_T, lowest), lowest]).amax()
