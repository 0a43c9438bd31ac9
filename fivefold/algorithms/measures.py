"""Sums of a policy's tokens: entropy by position, distance from the old policy, mismatch of rollout and trainer."""

from __future__ import annotations

import torch

from fivefold.algorithms.kl import bounded_exp, kl_estimate
from fivefold.algorithms.loss import Sums, largest, means, zero_unless
from fivefold.algorithms.metrics import Metric, Metrics
from fivefold.algorithms.sequences import PolicyTokens, Sequences

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
