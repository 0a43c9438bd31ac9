"""Rewards: functions that judge completions."""

from fivefold.rewards.resolve import NamedReward, Reward, check_ground_truths, compute_rewards, resolve_reward

__all__ = ["NamedReward", "Reward", "check_ground_truths", "compute_rewards", "resolve_reward"]
