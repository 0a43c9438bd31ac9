"""Verifiers: what a completion is worth."""

from fivefold.rewards.resolve import NamedReward, Reward, compute_rewards, resolve_reward

__all__ = ["NamedReward", "Reward", "compute_rewards", "resolve_reward"]
