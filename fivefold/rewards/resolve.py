"""Finds the reward that a recipe names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from pydantic import TypeAdapter

from fivefold.config.schema import RewardConfig
from fivefold.rewards.exact_match import ExactMatch
from fivefold.rewards.math_reward import MathReward
from fivefold.rewards.reward import NamedReward
from fivefold.rewards.user_function import load_user_reward

BUILT_IN: Mapping[str, type[ExactMatch] | type[MathReward]] = {"exact_match": ExactMatch, "math": MathReward}


def resolve_reward(config: RewardConfig, timeout_s: float | None = None) -> NamedReward:
    """Return the reward that a recipe names: `exact_match`, `math`, or a user's own function.

    Args:
        config: the recipe's `reward` section.
        timeout_s: `scheduler.timeout_s`, the most seconds that all rewards of a step may take; None: no limit.

    Raises:
        ValueError: there is no such reward, or it cannot be called with the arguments of `Reward`.
    """
    if config.fn in BUILT_IN:
        return _built_in(config, timeout_s)
    if not all(config.fn.rpartition(":")):
        raise ValueError(
            f"reward.fn={config.fn!r} is neither one of {sorted(BUILT_IN)} nor of the form module:function or "
            "file.py:function"
        )
    reward = load_user_reward(config.fn, config.kwargs)
    return NamedReward(config.fn, reward, timeout_s, is_coroutine=reward.is_coroutine)


def _built_in(config: RewardConfig, timeout_s: float | None) -> NamedReward:
    kind = BUILT_IN[config.fn]
    known = sorted(field.name for field in fields(kind))
    if unknown := sorted(set(config.kwargs) - set(known)):
        raise ValueError(f"reward.kwargs has {unknown}, but the reward {config.fn!r} takes {known}")
    reward = TypeAdapter(kind).validate_python(config.kwargs)
    return NamedReward(
        config.fn, reward, timeout_s, n_threads=reward.n_at_once if isinstance(reward, MathReward) else 1
    )
