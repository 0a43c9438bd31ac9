"""OPMD: the baseline of online policy mirror descent."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from fivefold.algorithms.advantages.scores import Scores


def opmd(scores: Scores, tau: Annotated[float, Field(gt=0)] = 1.0) -> torch.Tensor:
    """Compute A_i = R_i - tau log(1/n sum_j exp(R_j / tau)) over the group's n completions.

    The baseline is the normalising constant of the policy that a KL penalty of weight tau would lead to (Kimi team
    2025, arXiv 2501.12599, section 2.3.2); for large tau it is the mean.
    """
    group = scores.of_group
    # The largest reward is subtracted first, so that no exponential overflows.
    below_N = scores.rewards_N - group.most_N
    mean_N = group.sum((below_N / tau).exp()) / group.count_N
    return group.zero_if_constant(below_N - tau * mean_N.log())
