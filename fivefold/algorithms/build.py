"""Builds the loss and the advantage that a recipe names, from their rows or from the user's own code."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch

from fivefold.algorithms.advantages.compute import Advantage, Scores, check_result
from fivefold.algorithms.corrections import RolloutCorrection
from fivefold.algorithms.distillation import Distillation
from fivefold.algorithms.loss import Surrogate
from fivefold.algorithms.policy_loss import PolicyLoss
from fivefold.algorithms.user_loss import UserLoss, load
from fivefold.config.methods import ADVANTAGES, LOSSES, Method
from fivefold.config.options import built_in, check_types, options
from fivefold.config.schema.roles import ActorConfig
from fivefold.config.schema.rollout import GenerationConfig
from fivefold.config.schema.train import TrainRecipe
from fivefold.config.user_code import user_traceback


def check_methods(recipe: TrainRecipe) -> None:
    """Build the recipe's loss and advantage, which tries out those that the user has written.

    Raises:
        ValueError: one of them cannot be imported, does not do what its protocol says, or has wrong options.
    """
    loss = build_policy_loss(recipe.actor, recipe.gconfig)
    if loss.old_is_interpolated and loss.before is not None:
        raise ValueError(
            "actor.prox_logp_method=loglinear gives old log-probs in the update alone, but actor.loss or "
            "actor.rollout_correction.mask compares the old log-probs of a whole mini-batch before it: set it to "
            "recompute"
        )
    build_advantage(recipe.actor, recipe.gconfig.n_samples)


def method_at(row: Method) -> Any:
    """Return the class or function of a row."""
    module, _, name = row.at.partition(":")
    return getattr(import_module(f"fivefold.algorithms.{module}"), name)


def build_policy_loss(config: ActorConfig, sampling: GenerationConfig) -> PolicyLoss:
    """Return the loss of a recipe's actor on completions that are sampled with `sampling`.

    Raises:
        ValueError: a loss that cannot be built; see `build_surrogate`.
    """
    distill = config.distill
    return PolicyLoss(
        temperature=sampling.temperature,
        surrogate=build_surrogate(config),
        aggregation=config.loss_aggregation,
        length=config.loss_length or sampling.max_new_tokens,
        entropy_coeff=config.entropy_coeff,
        kl_coeff=config.kl_ctl if config.kl_in == "loss" else 0.0,
        kl_estimator=config.kl_estimator,
        correction=RolloutCorrection.of(config.rollout_correction),
        old_is_rollout=config.recompute_logprob is False,
        rollout_is_truncated=bool(sampling.alterations),
        distillation=None
        if distill.coeff == 0
        else Distillation(
            distill.coeff,
            distill.over,
            distill.direction,
            distill.teacher_share,
            distill.max_divergence,
            distill.min_logprob,
        ),
        opsm_delta=config.opsm_delta,
        kl_unbiased=config.kl_unbiased,
        kl_clip=config.kl_clip,
        old_is_interpolated=config.prox_logp_method == "loglinear",
    )


def build_surrogate(config: ActorConfig) -> Surrogate:
    """Return the loss that `actor.loss` names, with the actor's keys and `actor.loss_kwargs` as its options.

    Raises:
        ValueError: a user's class that cannot be imported, or options that the loss does not take.
    """
    key, name = "actor.loss", config.loss
    if name in LOSSES:
        kind = cast(type[Surrogate], method_at(LOSSES[name]))
        return built_in(key, name, kind, options(key, kind, config, config.loss_kwargs))
    return UserLoss.of(name, options(key, load(key, name), config, config.loss_kwargs))


def build_advantage(config: ActorConfig, n_samples: int) -> Callable[[Scores], torch.Tensor]:
    """Return the method that `actor.advantage` names, with its options, after trying it out on a small step.

    Args:
        config: its keys and `advantage_kwargs` are the options.
        n_samples: completions of each group.

    Raises:
        ValueError: a user's function that cannot be imported or fails, or options that the method does not take.
    """
    key, name = "actor.advantage", config.advantage
    method: Advantage = method_at(ADVANTAGES[name]) if name in ADVANTAGES else load(key, name)
    chosen = options(key, method, config, config.advantage_kwargs, n_arguments=1)
    if name in ADVANTAGES:
        check_types(key, name, method, config.advantage_kwargs)
    compute = partial(method, **chosen)
    _try_out(f"{key}={name}", compute, n_samples)
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
