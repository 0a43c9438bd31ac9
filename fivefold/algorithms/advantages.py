"""Advantages of sampled completions from their rewards.

    reward R of each completion
      -> shaped      R' = clip((R + bias) * scaling)
      -> normalised  A = (R' - mean) / (std + eps)       mean and std over the group, over the batch, or absent
      -> per token   A_t = A, minus the KL of the tokens from t on, if the KL is part of the reward

GRPO (Shao et al. 2024, eq. 3 and section 4.1.2) takes mean and std over the group, Dr. GRPO (Liu et al. 2025) the
mean alone, REINFORCE++ (Hu 2025) normalises over the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fivefold.algorithms.kl import KLEstimator, kl_estimate
from fivefold.config.schema import ActorConfig, NormConfig
from fivefold.types import Batch


@dataclass(frozen=True)
class Advantages:
    """One advantage for each completion, and metrics of the rewards."""

    advantages_N: torch.Tensor
    """float32 [N]."""
    metrics: dict[str, float]
    """`reward/{mean,std,min,max}` before shaping, `advantage/{mean,std}`, `groups`, and `zero_variance_groups`: the
    share of groups whose shaped rewards are all equal, which teach nothing under group normalisation."""


def compute_advantages(rewards: Sequence[float], group_ids: Sequence[int], config: ActorConfig) -> Advantages:
    """Shape and normalise the rewards of one step's completions.

    Args:
        rewards: N rewards.
        group_ids: N ids, equal for completions of the same prompt; in any order.
        config: its `reward_bias`, `reward_scaling`, `reward_clip` and `reward_norm` are read.

    Raises:
        ValueError: no completions, lengths that differ, or a reward that is not finite.
    """
    if not rewards or len(rewards) != len(group_ids):
        raise ValueError(
            f"{len(rewards)} rewards came with {len(group_ids)} group ids: pass one of each for every completion"
        )
    # float64: the mean of equal float32 rewards need not equal them, and eps would then decide their advantage.
    raw_N = torch.tensor(rewards, dtype=torch.float64)
    if not raw_N.isfinite().all():
        bad = int((~raw_N.isfinite()).nonzero()[0])
        raise ValueError(f"reward {bad} is {rewards[bad]}: rewards must be finite numbers; correct the reward function")
    numbers = {group: number for number, group in enumerate(dict.fromkeys(group_ids))}
    groups_N = torch.tensor([numbers[group] for group in group_ids])
    shaped_N = _shape(raw_N, config)
    # GAE takes the shaped rewards, and makes advantages of them and of a critic's values (gae.py).
    advantages_N = shaped_N if config.advantage == "gae" else normalize(shaped_N, groups_N, config.reward_norm)
    constant_G = _Sets(shaped_N, groups_N).is_constant_S
    return Advantages(
        advantages_N.float(),
        {
            "reward/mean": raw_N.mean().item(),
            "reward/std": raw_N.std(correction=0).item(),
            "reward/min": raw_N.min().item(),
            "reward/max": raw_N.max().item(),
            "advantage/mean": advantages_N.mean().item(),
            "advantage/std": advantages_N.std(correction=0).item(),
            "groups": float(len(constant_G)),
            "zero_variance_groups": constant_G.double().mean().item(),
        },
    )


def normalize(values_N: torch.Tensor, groups_N: torch.Tensor, norm: NormConfig) -> torch.Tensor:
    """Compute (x - mean) / (std + eps), where the levels in `norm` name the sets that mean and std are taken over.

    The standard deviation is the sample's (divided by n - 1). If all values of such a set are equal, they become
    exactly 0: the set holds no signal, and a division by eps would turn rounding errors into noise.

    Args:
        values_N: floating point [N].
        groups_N: int64 [N]: group of each value, numbered from 0.
        norm: levels of mean and std, and eps.

    Returns:
        [N], in the dtype of `values_N`.
    """
    everything_N = torch.zeros_like(groups_N)
    sets = {"group": _Sets(values_N, groups_N), "batch": _Sets(values_N, everything_N)}
    result_N = values_N
    is_constant_N = torch.zeros_like(groups_N, dtype=torch.bool)
    if norm.mean_level != "none":
        result_N = result_N - sets[norm.mean_level].mean_N
        is_constant_N |= sets[norm.mean_level].is_constant_N
    if norm.std_level != "none":
        result_N = result_N / (sets[norm.std_level].std_N + norm.eps)
        is_constant_N |= sets[norm.std_level].is_constant_N
    return torch.where(is_constant_N, torch.zeros_like(result_N), result_N)


class _Sets:
    """Statistics of the set that each value belongs to."""

    def __init__(self, values_N: torch.Tensor, sets_N: torch.Tensor) -> None:
        """`sets_N`: int64, the set of each value, numbered from 0."""
        n_sets = int(sets_N.max()) + 1
        count_S = values_N.new_zeros(n_sets).index_add_(0, sets_N, torch.ones_like(values_N))
        self.mean_N = (values_N.new_zeros(n_sets).index_add_(0, sets_N, values_N) / count_S)[sets_N]
        square_S = values_N.new_zeros(n_sets).index_add_(0, sets_N, (values_N - self.mean_N).square())
        # A set of one value is constant, and its standard deviation is not used.
        self.std_N = (square_S / (count_S - 1).clamp(min=1)).sqrt()[sets_N]
        least_S = values_N.new_zeros(n_sets).scatter_reduce_(0, sets_N, values_N, "amin", include_self=False)
        most_S = values_N.new_zeros(n_sets).scatter_reduce_(0, sets_N, values_N, "amax", include_self=False)
        self.is_constant_S = least_S == most_S
        self.is_constant_N = self.is_constant_S[sets_N]


@dataclass(frozen=True)
class KLInReward:
    """A KL penalty that is part of the reward instead of the loss (`kl_in=reward`)."""

    kl_ctl: float
    """Weight of the penalty, in advantage per nat."""
    estimator: KLEstimator

    def subtracted(self, batch: Batch) -> Batch:
        """Return `batch` with the penalty subtracted from its `advantages`.

        The penalty is the KL from the policy that sampled, by `old_logprobs` (`rollout_logprobs` if the batch lacks
        them), to the reference, by `ref_logprobs`.
        """
        kl_T = self.estimate(batch)
        return batch.with_fields(advantages=subtract_kl_to_go(batch.fields["advantages"], kl_T, batch, self.kl_ctl))

    def estimate(self, batch: Batch) -> torch.Tensor:
        """Return the KL estimate of each token, [T], without its weight."""
        sampled_T = batch.fields.get("old_logprobs", batch.fields["rollout_logprobs"])
        return kl_estimate(sampled_T, batch.fields["ref_logprobs"], self.estimator)


def subtract_kl_to_go(advantages_T: torch.Tensor, kl_T: torch.Tensor, batch: Batch, kl_ctl: float) -> torch.Tensor:
    """Return the advantages when the KL penalty is part of the reward instead of the loss (`kl_in=reward`).

    Token t of a completion earns -kl_ctl * KL_t. The undiscounted sum of these rewards from t on, which token t can
    still influence, is added to the completion's advantage:

        A_t = A - kl_ctl * sum over trained tokens s >= t of KL_s

    The KL term is not normalised with the rewards: kl_ctl keeps its unit (advantage per nat) whatever their spread.

    Args:
        advantages_T: float32 [T]: on each token, the advantage of its completion.
        kl_T: float32 [T]: the KL estimate of each token under the policy that sampled it, without gradient.
        batch: the sequences; its mask says which tokens count.
        kl_ctl: weight of the penalty.

    Returns:
        float32 [T].
    """
    counted_T = torch.where(batch.mask_T.bool(), kl_T, torch.zeros_like(kl_T))
    to_go = [kl.flip(0).cumsum(0).flip(0) for kl in batch.split(counted_T)]
    return advantages_T - kl_ctl * torch.cat(to_go)


def _shape(rewards_N: torch.Tensor, config: ActorConfig) -> torch.Tensor:
    shaped_N = (rewards_N + config.reward_bias) * config.reward_scaling
    return shaped_N if config.reward_clip is None else shaped_N.clamp(-config.reward_clip, config.reward_clip)
