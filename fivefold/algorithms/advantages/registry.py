"""The advantages by the name that `actor.advantage` gives them, and how one is made from a recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from fivefold.algorithms.advantages.asymre import asymre
from fivefold.algorithms.advantages.gdpo import gdpo
from fivefold.algorithms.advantages.gpg import gpg
from fivefold.algorithms.advantages.grpo import grpo
from fivefold.algorithms.advantages.none import none
from fivefold.algorithms.advantages.opmd import opmd
from fivefold.algorithms.advantages.opo import opo
from fivefold.algorithms.advantages.pass_at_k import pass_at_k, pass_at_k_best
from fivefold.algorithms.advantages.raft import raft
from fivefold.algorithms.advantages.reinforce_pp import reinforce_pp, reinforce_pp_baseline
from fivefold.algorithms.advantages.remax import remax
from fivefold.algorithms.advantages.rloo import rloo
from fivefold.algorithms.advantages.scores import Advantage, Scores
from fivefold.algorithms.advantages.token_baseline import optimal_token_baseline
from fivefold.algorithms.user_method import load
from fivefold.config.options import check_types, options
from fivefold.config.schema.roles import ActorConfig
from fivefold.config.user_code import user_traceback


def shaped_rewards(scores: Scores) -> torch.Tensor:
    """Return the rewards: GAE makes advantages of them and of a critic's values, where the values are (gae.py)."""
    return scores.rewards_N


METHODS: Mapping[str, Callable[..., torch.Tensor]] = {
    "grpo": grpo,
    "gdpo": gdpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "remax": remax,
    "opo": opo,
    "gpg": gpg,
    "pass_at_k": pass_at_k,
    "pass_at_k_best": pass_at_k_best,
    "asymre": asymre,
    "opmd": opmd,
    "raft": raft,
    "optimal_token_baseline": optimal_token_baseline,
    "gae": shaped_rewards,
    "none": none,
}


def build_advantage(config: ActorConfig, n_samples: int) -> Callable[[Scores], torch.Tensor]:
    """Return the method that `actor.advantage` names, with its options, after it was tried out on a small step.

    Args:
        config: its keys and `advantage_kwargs` are the options.
        n_samples: completions of each group.

    Raises:
        ValueError: a user's function that cannot be imported or fails, or options that the method does not take.
    """
    key = "actor.advantage"
    method: Advantage = METHODS.get(config.advantage) or load(key, config.advantage)
    chosen = options(key, method, config, config.advantage_kwargs, n_arguments=1)
    if config.advantage in METHODS:
        check_types(key, config.advantage, method, config.advantage_kwargs)

    def compute(scores: Scores) -> torch.Tensor:
        return method(scores, **chosen)

    _try_out(f"{key}={config.advantage}", compute, n_samples)
    return compute


def _try_out(key: str, compute: Callable[[Scores], torch.Tensor], n_samples: int) -> None:
    rewards_N = torch.arange(2 * n_samples, dtype=torch.float64) % 2
    groups_N = torch.repeat_interleave(torch.arange(2), n_samples)
    scores = Scores(rewards_N, groups_N, torch.full_like(groups_N, 5), torch.zeros_like(rewards_N))
    try:
        result = compute(scores)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        shown = user_traceback(error, [f"{Path(__file__).parent}/"])
        raise ValueError(f"{key} failed on two groups of {n_samples} completions:\n{shown}") from error
    check_result(key, result, scores)


def check_result(key: str, result: object, scores: Scores) -> None:
    """Refuse a result that is not one finite number for each completion.

    Raises:
        ValueError: it is something else.
    """
    wanted = tuple(scores.rewards_N.shape)
    if not isinstance(result, torch.Tensor) or tuple(result.shape) != wanted or not result.is_floating_point():
        found = f"{result.dtype} {tuple(result.shape)}" if isinstance(result, torch.Tensor) else type(result).__name__
        raise ValueError(f"{key} returned {found}: return a floating-point tensor of shape {wanted}, one a completion")
    if not result.float().isfinite().all():
        raise ValueError(
            f"{key} returned an advantage that is not finite in float32, for finite rewards: their sizes are up to "
            f"{float(scores.rewards_N.abs().max()):.2g}; if that is too large, set actor.reward_scaling or reward_clip"
        )
