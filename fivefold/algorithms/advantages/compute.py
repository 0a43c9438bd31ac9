"""From the rewards of a step's completions to their advantages.

reward R of each completion
  -> shaped       R' = clip((R - length penalties + bias) * scaling)           fivefold/algorithms/reward_shaping.py
  -> advantage    A, by `actor.advantage`                                      the other files of this folder
  -> per token    A_t = A, minus the KL of the tokens from t on, if the KL is part of the reward; whitened if wanted
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from fivefold.algorithms.advantages.scores import Each, Scores, check_result
from fivefold.algorithms.reward_shaping import RewardShaping


@dataclass(frozen=True)
class Outcomes:
    """N completions, as the step has generated them."""

    rewards: Sequence[float]
    """Reward of each, as the reward function returned it."""
    groups: Sequence[int]
    """An id of each one's prompt, in any order."""
    lengths: Sequence[int]
    """Sampled tokens of each."""
    parts: Sequence[Mapping[str, float]] = ()
    """The rewards of each by name, whose weighted sums are `rewards`; empty: there is only one."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Factors of the rewards in the sum, by name."""

    def __post_init__(self) -> None:
        if not self.rewards or not len(self.rewards) == len(self.groups) == len(self.lengths):
            raise ValueError(
                f"{len(self.rewards)} rewards came with {len(self.groups)} group ids and {len(self.lengths)} lengths: "
                "pass one of each for every completion"
            )


@dataclass(frozen=True)
class Advantages:
    """One advantage for each completion, and metrics of the rewards."""

    advantages_N: torch.Tensor
    """float32 [N]."""
    metrics: dict[str, float]
    """`reward/{mean,std,min,max}` before shaping, `reward/penalty` if there are length penalties,
    `advantage/{mean,std}`, `groups`, and `zero_variance_groups`: the share of groups whose shaped rewards are all
    equal, which teach nothing under group normalisation."""


def compute_advantages(
    outcomes: Outcomes,
    shaping: RewardShaping | None,
    method: Callable[[Scores], torch.Tensor],
    greedy: Outcomes | None = None,
) -> Advantages:
    """Shape the rewards of one step's completions, and compute their advantages.

    Args:
        outcomes: the completions.
        shaping: how rewards are shaped; None: they stay as they are.
        method: the advantage.
        greedy: the greedy completion of each group, for methods with such a baseline.

    Raises:
        ValueError: a reward that is not finite, or a result of the method that is not a finite number a completion.
    """
    raw_N = _finite(outcomes.rewards)
    lengths_N = torch.tensor(outcomes.lengths)
    numbers = {group: number for number, group in enumerate(dict.fromkeys(outcomes.groups))}
    groups_N = torch.tensor([numbers[group] for group in outcomes.groups])
    shaped_N = raw_N if shaping is None else shaping(raw_N, lengths_N)
    scores = Scores(shaped_N, groups_N, lengths_N, each=_each(outcomes, shaping, lengths_N))
    if greedy is not None:
        greedy_G = _finite(greedy.rewards)
        if shaping is not None:
            greedy_G = shaping(greedy_G, torch.tensor(greedy.lengths))
        baselines = dict(zip(greedy.groups, greedy_G.tolist(), strict=True))
        scores = replace(
            scores, baselines_N=torch.tensor([baselines[group] for group in outcomes.groups], dtype=torch.float64)
        )
    advantages_N = method(scores)
    check_result("actor.advantage", advantages_N, scores)
    constant_G = scores.of_group.is_constant_S
    metrics = {
        "reward/mean": raw_N.mean().item(),
        "reward/std": raw_N.std(correction=0).item(),
        "reward/min": raw_N.min().item(),
        "reward/max": raw_N.max().item(),
        "advantage/mean": advantages_N.double().mean().item(),
        "advantage/std": advantages_N.double().std(correction=0).item(),
        "groups": float(len(constant_G)),
        "zero_variance_groups": constant_G.double().mean().item(),
    }
    if shaping is not None and shaping.has_penalty:
        metrics["reward/penalty"] = shaping.penalty(lengths_N).mean().item()
    return Advantages(advantages_N.float(), metrics)


def _each(outcomes: Outcomes, shaping: RewardShaping | None, lengths_N: torch.Tensor) -> Each | None:
    if not outcomes.parts:
        return None
    rows = [[part.get(name, math.nan) for name in outcomes.weights] for part in outcomes.parts]
    rewards_NK, weights = torch.tensor(rows, dtype=torch.float64), list(outcomes.weights.values())
    if shaping is not None and shaping.has_penalty:
        rewards_NK = torch.cat([rewards_NK, -shaping.penalty(lengths_N).unsqueeze(1)], dim=1)
        weights.append(1.0)
    return Each(rewards_NK, torch.tensor(weights, dtype=torch.float64))


def _finite(rewards: Sequence[float]) -> torch.Tensor:
    # float64: the mean of equal float32 rewards need not equal them, and eps would then decide their advantage.
    rewards_N = torch.tensor(rewards, dtype=torch.float64)
    if not rewards_N.isfinite().all():
        bad = int((~rewards_N.isfinite()).nonzero()[0])
        raise ValueError(f"reward {bad} is {rewards[bad]}: rewards must be finite numbers; correct the reward function")
    return rewards_N
