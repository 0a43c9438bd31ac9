"""Estimators of KL(policy || reference) from the log-probabilities of sampled tokens.

With x ~ policy and d = log policy(x) - log reference(x) (Schulman 2020, http://joschu.net/blog/kl-approx.html):

    k1 = d                      unbiased, high variance, may be negative
    k2 = d^2 / 2                biased, low variance; its gradient is the gradient of the KL divergence
    k3 = exp(-d) - 1 + d        unbiased, low variance, never negative
    abs = |d|                   biased; with a gradient of one size whatever the distance

As a *loss*, k1 has a gradient of zero in expectation and constrains nothing, so it belongs in the reward.
"""

from __future__ import annotations

from typing import Literal

import torch

KLEstimator = Literal["k1", "k2", "k3", "abs"]

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to ±20 before they are exponentiated: exp(20) = 4.9e8 still leaves float32 sums finite."""


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return exp of a log-ratio, clamped to ±`LOG_RATIO_LIMIT`; beyond it the value is constant, the gradient zero."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def kl_estimate(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: KLEstimator) -> torch.Tensor:
    """Estimate KL(policy || reference) for each token, from samples of the policy.

    Args:
        logprobs: log-probabilities under the policy, any shape; gradients flow through them.
        ref_logprobs: log-probabilities under the reference, same shape.
        estimator: `k1`, `k2`, `k3` or `abs`, as at the top of this file.

    Returns:
        The estimate for each token, same shape and dtype.
    """
    log_ratio = logprobs - ref_logprobs
    match estimator:
        case "k1":
            return log_ratio
        case "k2":
            return 0.5 * log_ratio.square()
        case "abs":
            return log_ratio.abs()
        case "k3":
            # expm1(-d) + d keeps the digits that exp(-d) - 1 + d cancels when policy and reference are close.
            bounded = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
            return torch.expm1(-bounded) + bounded
