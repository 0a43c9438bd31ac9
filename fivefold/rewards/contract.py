"""What a reward function is: protocols, and the base classes of the package's own."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from fivefold.types import Prompt


class Reward(Protocol):
    """Judges one response.

    A user's own function has this signature, with `reward.kwargs` as further keyword arguments:

        def word_count(response, ground_truth, *, data_source, extra_info, target=10):
            return -abs(len(response.split()) - target)

    It may also be a coroutine function (`async def`).
    """

    def __call__(
        self, response: str, ground_truth: Any, *, data_source: str, extra_info: Mapping[str, Any]
    ) -> float | Awaitable[float]:
        """Return the reward of one response.

        Args:
            response: the completion, decoded without special tokens.
            ground_truth: the ground truth of the prompt in the data set.
            data_source: name of the data set or task that the prompt comes from.
            extra_info: the `extra_info` of the prompt in the data set.

        Returns:
            A finite number; higher is better.
        """


class GroupReward(Protocol):
    """Judges all responses to a prompt together. A user's function is one if its first argument is `responses`."""

    def __call__(
        self, responses: Sequence[str], ground_truth: Any, *, data_source: str, extra_info: Mapping[str, Any]
    ) -> Sequence[float] | Awaitable[Sequence[float]]:
        """Return the rewards of the responses, in their order; see `Reward` for the arguments."""


@runtime_checkable
class PromptReward(Protocol):
    """Judges one response, and sees the whole prompt."""

    def judge_prompt(self, prompt: Prompt, response: str) -> float:
        """Return the reward of one response."""


@runtime_checkable
class BuiltIn(Protocol):
    """What every reward that ships has, besides judging."""

    @property
    def n_at_once(self) -> int:
        """Number of responses that can be judged at the same time, each from a separate thread."""

    def check_machine(self) -> None:
        """Refuse a machine that lacks what the reward needs.

        Raises:
            ValueError: something is missing.
        """

    def check_ground_truth(self, ground_truth: Any) -> None:
        """Refuse a ground truth with which no response can be compared.

        Raises:
            ValueError: it cannot be compared.
        """


class QuickReward:
    """A reward of few instructions, which threads would not make faster, and which needs nothing of the machine."""

    @property
    def n_at_once(self) -> int:
        """Number of responses that are judged at the same time."""
        return 1

    def check_machine(self) -> None:
        """Accept every machine."""


class GradedReward(QuickReward):
    """A quick reward whose arguments are the numbers that it gives."""

    def __post_init__(self) -> None:
        """Check the arguments.

        Raises:
            ValueError: one that is no finite number.
        """
        for name, value in vars(self).items():
            if not math.isfinite(value):
                raise ValueError(f"reward.kwargs.{name}={value} must be a finite number")


@dataclass(frozen=True)
class ScoredByModel:
    """The reward is the score of the recipe's reward model, which reads tokens and has separate processes."""


@dataclass(frozen=True)
class GivenByEnvironment:
    """The reward comes with the episode, from the environment that has played it."""
