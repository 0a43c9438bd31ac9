"""The reward `repetition`: minus the share of a response's word sequences that it has had before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fivefold.rewards.contract import QuickReward


@dataclass(frozen=True)
class Repetition(QuickReward):
    """Counts runs of `n` words, split at white space, in lower case.

    n=3    "a b c d"            0.0, two different runs
    n=3    "a b c a b c"       -0.25, one of four runs comes again
    """

    n: int = 3
    """Words of a run."""

    def __post_init__(self) -> None:
        """Check the argument.

        Raises:
            ValueError: it is below 1.
        """
        if self.n < 1:
            raise ValueError(f"reward.kwargs.n={self.n} must be at least 1")

    def check_ground_truth(self, ground_truth: Any) -> None:
        """Accept every ground truth, which is not looked at."""

    def __call__(self, response: str, ground_truth: Any, *, data_source: str, extra_info: Mapping[str, Any]) -> float:
        """Return 0 if no run comes again, and a number above -1 otherwise."""
        words = response.lower().split()
        runs = list(zip(*(words[start:] for start in range(self.n)), strict=False))
        return len(set(runs)) / len(runs) - 1.0 if runs else 0.0
