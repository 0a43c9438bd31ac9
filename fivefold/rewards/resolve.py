"""Finds the rewards that a recipe names."""

from __future__ import annotations

from dataclasses import replace

from fivefold.config.schema.rewards import OF_ENVIRONMENT, OF_MODEL, OneRewardConfig, RewardConfig
from fivefold.rewards.contract import GivenByEnvironment, ScoredByModel
from fivefold.rewards.reward import NamedReward
from fivefold.rewards.reward_set import RewardSet, WeightedReward
from fivefold.rewards.static_check import BUILT_IN, built_in_reward, in_rewards, no_such_reward
from fivefold.rewards.user_function import load_user_reward


def resolve_rewards(config: RewardConfig, timeout_s: float | None = None) -> RewardSet:
    """Return the rewards that a recipe names: the one of `fn`, or all in `rewards`.

    Args:
        config: the recipe's `reward` section.
        timeout_s: `scheduler.timeout_s`, the most seconds that each reward may take of what is computed together; None:
            no limit.

    Raises:
        ValueError: see `resolve_reward`; the message names the reward.
    """
    if not config.rewards:
        return RewardSet.of(resolve_reward(config, timeout_s))
    rewards = []
    for name, each in config.rewards.items():
        with in_rewards(name):
            reward = replace(resolve_reward(each, timeout_s), name=name)
        sources = None if each.data_sources is None else frozenset(each.data_sources)
        rewards.append(WeightedReward(reward, each.weight, sources))
    return RewardSet(tuple(rewards), config.accuracy_of)


def resolve_reward(config: OneRewardConfig, timeout_s: float | None = None) -> NamedReward:
    """Return the reward that a recipe names: a built-in one, or a user's own function.

    Args:
        config: the recipe's `reward` section, or one of its `rewards`.
        timeout_s: `scheduler.timeout_s`, the most seconds that rewards which are computed together may take; None: no
            limit.

    Raises:
        ValueError: there is no such reward, or it cannot be called with the arguments of `Reward`, or the machine
            lacks what it needs.
    """
    if config.fn == OF_MODEL:
        return NamedReward(config.fn, ScoredByModel(), timeout_s)
    if config.fn == OF_ENVIRONMENT:
        return NamedReward(config.fn, GivenByEnvironment(), timeout_s)
    if config.fn in BUILT_IN:
        built_in = built_in_reward(config)
        built_in.check_machine()
        return NamedReward(config.fn, built_in, timeout_s, n_threads=built_in.n_at_once)
    if not all(config.fn.rpartition(":")):
        raise no_such_reward(config.fn)
    reward = load_user_reward(config.fn, config.kwargs)
    return NamedReward(
        config.fn,
        reward,
        timeout_s,
        is_coroutine=reward.is_coroutine,
        judges_groups=reward.judges_groups,
        is_of_user=True,
        reads_tokens=reward.reads_tokens,
    )
