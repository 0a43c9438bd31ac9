"""The age of tokens: old log-probs that are interpolated by it, and metrics by age.

A step that begins with weights of version v trains tokens that weights of versions v - age have sampled. On the way to
version v + 1, the policy p is age + 1 versions away from the one that sampled, q, and the proximal policy p_old of
version v lies between them. If log-probs move evenly from version to version,

    log p_old ~ log q / (age + 1) + log p * age / (age + 1)

which needs no extra forward pass: A-3PO (Li et al. 2025, arXiv 2512.06547, section 3). There, the distance of p
from q is d with the weight 1 / d for log q; AReaL's code takes d = age, for which tokens of age 1 have p_old = q.
"""

from __future__ import annotations

import torch

from fivefold.algorithms.kl import bounded_exp, kl_estimate
from fivefold.algorithms.metrics import Metric, Metrics
from fivefold.algorithms.token_sums import zero_unless

MOST_TOLD = 8
"""Ages below this have their own metrics; older tokens count as this age."""


def interpolated(rollout_T: torch.Tensor, current_T: torch.Tensor, age_T: torch.Tensor) -> torch.Tensor:
    """Return log p_old as at the top of this file, without gradient.

    Args:
        rollout_T: log q of each token.
        current_T: log p.
        age_T: age of each token; below 0 for tokens that were not sampled, whose values are of no use.
    """
    age_T = age_T.clamp(min=0).to(rollout_T.dtype)
    return rollout_T + (current_T.detach() - rollout_T) * age_T / (age_T + 1)


def metrics_by_age(
    trainer_T: torch.Tensor,
    rollout_T: torch.Tensor,
    cut_T: torch.Tensor,
    age_T: torch.Tensor,
    trained_T: torch.Tensor,
    most: int,
) -> Metrics:
    """Return means over the trained tokens of each age up to `most`, and the share of these tokens.

    They are `staleness/tokens/<age>`, `staleness/mismatch_kl/<age>`, `staleness/ratio/<age>` and
    `staleness/cut/<age>`.

    Args:
        trainer_T: log p_old, or log p where that is interpolated.
        rollout_T: log q; tokens for which it is NaN are left out.
        cut_T: bool: whether the correction has truncated the token's weight, or left the token out.
        age_T: age of each token.
        trained_T: bool: whether it is trained.
        most: the largest age that a token may have.
    """
    known_T = trained_T & ~rollout_T.isnan()
    log_w_T = torch.where(known_T, trainer_T - rollout_T, torch.zeros_like(trainer_T)).detach()
    w_T = bounded_exp(log_w_T)
    kl_T = kl_estimate(torch.zeros_like(log_w_T), log_w_T, "k3")
    told_T = age_T.clamp(max=MOST_TOLD)
    measures = {"mismatch_kl": kl_T, "ratio": w_T, "cut": cut_T.to(w_T.dtype)}
    metrics: Metrics = {}
    for age in range(min(most, MOST_TOLD) + 1):
        own_T = known_T & (told_T == age)
        n = own_T.sum()
        metrics[f"staleness/tokens/{age}"] = Metric(n, trained_T.sum(), "share")
        for name, values_T in measures.items():
            metrics[f"staleness/{name}/{age}"] = Metric(zero_unless(own_T, values_T).sum(), n)
    return metrics
