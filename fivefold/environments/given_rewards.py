"""Rewards that a user's environment gives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fivefold.types import ENVIRONMENT


def named_rewards(value: Any) -> dict[str, float] | None:
    """Return a number, or numbers by name, as rewards by name; None: it is neither, or a number is not finite."""
    rewards = value if isinstance(value, Mapping) else {ENVIRONMENT: value}
    if not all(isinstance(number, (int, float)) and math.isfinite(number) for number in rewards.values()):
        return None
    return {str(name): float(number) for name, number in rewards.items()}


def in_the_end(rewards: Sequence[Mapping[str, float]], n_turns: int) -> list[Mapping[str, float]]:
    """Return the rewards of each of `n_turns` turns: `rewards` are what the last ones have, the others have none."""
    return [{}] * (n_turns - len(rewards)) + list(rewards)
