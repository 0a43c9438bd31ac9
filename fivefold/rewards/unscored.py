"""Rewards in place of scores. The module needs no torch, as a plan has none."""

from __future__ import annotations


class Unscored(float):
    """What a response counts as that could not be scored."""

    def __new__(cls, value: float, reason: str = "") -> Unscored:
        """Return the reward `value`.

        Args:
            value: the reward.
            reason: why there is no score.
        """
        reward = super().__new__(cls, value)
        reward.reason = reason
        return reward

    reason: str
