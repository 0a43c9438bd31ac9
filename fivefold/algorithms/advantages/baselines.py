"""Rewards less a baseline, without a division by the standard deviation.

Where the baseline is taken over the group, a group of equal rewards has advantages of exactly 0: it carries no signal.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from fivefold.algorithms.advantages.compute import Scores


def rloo(scores: Scores) -> torch.Tensor:
    """Compute A_i = R_i - 1/(n - 1) sum_{j != i} R_j over the group's n completions.

    REINFORCE leave-one-out (Kool et al. 2019; Ahmadian et al. 2024, arXiv 2402.14740). It equals n/(n - 1) times the
    difference from the group's mean. A completion that is alone in its group has 0.
    """
    group = scores.of_group
    return group.zero_if_constant((scores.rewards_N - group.mean_N) * group.count_N / (group.count_N - 1).clamp(min=1))


def reinforce_pp_baseline(scores: Scores) -> torch.Tensor:
    """Return A = R - mean over the group, which `actor.whiten_advantages` brings to standard deviation 1.

    REINFORCE++-baseline (Hu 2025, arXiv 2501.03262).
    """
    return scores.of_group.zero_if_constant(scores.rewards_N - scores.of_group.mean_N)


def gpg(scores: Scores) -> torch.Tensor:
    """Compute A = N / (N - M) * (R - mean over the group), where M of the N completions are in groups of equal rewards.

    Group policy gradient (Chu et al. 2025, arXiv 2504.02546): groups without a signal do not shrink the gradient of the
    others.
    """
    group = scores.of_group
    n_with_signal = (~group.is_constant_N).sum().clamp(min=1)
    return group.zero_if_constant(scores.rewards_N - group.mean_N) * len(scores.rewards_N) / n_with_signal


def opo(scores: Scores) -> torch.Tensor:
    """Compute A_i = R_i - sum_j l_j R_j / sum_j l_j over the group, with lengths l in tokens.

    On-policy RL with optimal reward baseline (Hao et al. 2025, arXiv 2505.23585): the baseline has the least variance
    if the squared norm of a completion's gradient is proportional to its length.
    """
    group = scores.of_group
    # A completion without tokens has no gradient, so a group of them may have any baseline.
    weights_N = scores.lengths_N.to(scores.rewards_N.dtype)
    baseline_N = group.sum(weights_N * scores.rewards_N) / group.sum(weights_N).clamp(min=1.0)
    return group.zero_if_constant(scores.rewards_N - baseline_N)


def opmd(scores: Scores, tau: Annotated[float, Field(gt=0)] = 1.0) -> torch.Tensor:
    """Compute A_i = R_i - tau log(1/n sum_j exp(R_j / tau)) over the group's n completions.

    Online policy mirror descent: the baseline is the normalising constant of the policy that a KL penalty of weight tau
    would lead to (Kimi team 2025, arXiv 2501.12599, section 2.3.2); for large tau it is the mean.
    """
    group = scores.of_group
    # The largest reward is subtracted first, so that no exponential overflows.
    below_N = scores.rewards_N - group.most_N
    mean_N = group.sum((below_N / tau).exp()) / group.count_N
    return group.zero_if_constant(below_N - tau * mean_N.log())


def asymre(scores: Scores, baseline_shift: float = -0.1) -> torch.Tensor:
    """Compute A = R - (mean over the group + baseline_shift), so that good completions count more than bad ones.

    Asymmetric REINFORCE (Arnal et al. 2025, arXiv 2506.20520), for samples of older policies. With a non-zero shift, a
    group of equal rewards is trained on too.
    """
    return scores.of_group.zero_if_constant(scores.rewards_N - scores.of_group.mean_N) - baseline_shift


def remax(scores: Scores) -> torch.Tensor:
    """Compute A = R - R(greedy completion of the same prompt) (Li et al. 2023, arXiv 2310.10505, algorithm 1).

    Raises:
        ValueError: there are no greedy completions.
    """
    if scores.baselines_N is None:
        raise ValueError("ReMax compares with greedy completions, and none were generated")
    return scores.rewards_N - scores.baselines_N
