"""Online DPO: the best and the worst completion of each group are a pair, on which DPO's loss is taken.

With s = log p(completion) - log p_ref(completion), sums over the sampled tokens, and L the mean over the pairs of a
mini-batch of DPO's loss in the margin s(best) - s(worst) (`fivefold/algorithms/preferences.py`), a completion of the N
in pairs has

    A = -N dL/ds        with `sigmoid`: 2 beta sigmoid(-beta margin) for the best, minus that for the worst

so that `loss: reinforce`, -A log p, summed over tokens and divided by N, has the gradient of L
(Guo et al. 2024, arXiv 2402.04792).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field

from fivefold.algorithms.advantages.compute import ROUNDING, Scores


def dpo(
    scores: Scores,
    loss_type: Literal["sigmoid", "hinge", "ipo"] = "sigmoid",
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0,
) -> torch.Tensor:
    """Return the rewards, by which `fivefold/update/pairs.py` finds the pairs.

    Args:
        scores: the completions.
        loss_type: the loss, which this function does not take.
        label_smoothing: the share of pairs that count as swapped, with `sigmoid`.

    Raises:
        ValueError: another loss with `label_smoothing`.
    """
    if label_smoothing > 0 and loss_type != "sigmoid":
        raise ValueError(f"label_smoothing={label_smoothing} is for loss_type=sigmoid, not {loss_type}: drop it")
    return scores.rewards_N


def best_and_worst(values: Sequence[float], groups: Sequence[int], trained: Sequence[bool]) -> list[tuple[int, int]]:
    """Return the indices of the best and of the worst completion of each group in which they differ.

    Args:
        values: shaped reward of each completion.
        groups: the group of each.
        trained: whether each may be part of a pair; one that was cut off may not, if such ones are not trained on.
    """
    members: dict[int, list[int]] = defaultdict(list)
    for index, group in enumerate(groups):
        if trained[index]:
            members[group].append(index)
    found = []
    for own in members.values():
        best, worst = max(own, key=lambda index: values[index]), min(own, key=lambda index: values[index])
        size = max(1.0, abs(values[best]), abs(values[worst]))
        if values[best] - values[worst] > ROUNDING * size:
            found.append((best, worst))
    return found
