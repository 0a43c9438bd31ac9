"""What rewards have in common that ask for their scores, and what becomes of a response without one."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fivefold.rewards.unscored import Unscored

MOST_AT_ONCE = 1024
MOST_FAILED = 64
"""Responses in a row without a score, after which the run ends though `on_failure` is given, in the midst of a step."""


class Question(Protocol):
    """What is shown of a prompt. A prompt itself needs torch, which a plan does without."""

    @property
    def text(self) -> str:
        """The prompt as the model in training sees it."""

    @property
    def chat(self) -> Sequence[Mapping[str, Any]]:
        """The prompt as chat messages."""

    @property
    def ground_truth(self) -> Any:
        """The ground truth."""

    @property
    def data_source(self) -> str:
        """Name of the data set or task."""

    @property
    def extra_info(self) -> Mapping[str, Any]:
        """The row's `extra_info`."""


class NoScore(Exception):
    """A response has no score. The message is the reason."""

    is_settings_fault = False
    """Whether every response will fail in this way."""


class HostFailed(Exception):
    """The processes of a model that the run hosts failed. Whoever waits for scores raises the cause in its place."""


@dataclass(frozen=True, kw_only=True)
class Asking(ABC):
    """A reward that asks for its scores, and the keys of `reward.kwargs` that all of them have."""

    scale: float = 1.0
    """Factor from the score to the reward: 0.1 for scores from 0 to 10."""
    retries: int = 3
    """Further attempts after one that failed."""
    concurrency: int = 32
    """Requests at the same time."""
    on_failure: float | None = None
    """Reward of a response for which all attempts failed; None: the run ends. It also ends after `MOST_FAILED` such
    responses in a row, and after a step without any other."""
    failed_in_a_row: list[str] = field(default_factory=list, init=False, repr=False, compare=False)
    """Why the last responses had no score, since the last one that had."""

    @property
    @abstractmethod
    def title(self) -> str:
        """What messages call what is asked."""

    @abstractmethod
    def judge_prompt(self, prompt: Question, response: str) -> float:
        """Return the score of one response, times `scale`.

        Raises:
            ValueError: there is no score and `on_failure` is None, or every request will fail.
        """

    def __post_init__(self) -> None:
        """Check the arguments.

        Raises:
            ValueError: one that cannot work.
        """
        for name, (least, most) in self._bounds():
            if not least <= (value := getattr(self, name)) <= most:
                raise ValueError(f"reward.kwargs.{name}={value} must be from {least:g} to {most:,g}")
        for name in ("scale", "on_failure"):
            if (number := getattr(self, name)) is not None and not math.isfinite(number):
                raise ValueError(f"reward.kwargs.{name}={number} must be a finite number")

    def _bounds(self) -> Iterator[tuple[str, tuple[float, float]]]:
        """Yield the names of numbers, each with the least and the largest value."""
        yield "retries", (0, 100)
        yield "concurrency", (1, MOST_AT_ONCE)

    @property
    def n_at_once(self) -> int:
        """Number of responses that can be judged at the same time, each from a separate thread."""
        return self.concurrency

    def check_machine(self) -> None:  # noqa: B027 - not all need anything of the machine
        """Accept every machine."""

    def check_ground_truth(self, ground_truth: Any) -> None:  # noqa: B027 - there is nothing to refuse
        """Accept every ground truth: it is only shown."""

    def scored(self, ask: Callable[[], float]) -> float:
        """Return the reward that `ask` returns, or `on_failure` if it raises `NoScore`.

        Raises:
            ValueError: see `judge_prompt`.
        """
        try:
            score = ask()
        except NoScore as error:
            self.failed_in_a_row.append(str(error))
            if self.on_failure is None or error.is_settings_fault:
                raise ValueError(str(error)) from error
            if len(self.failed_in_a_row) >= MOST_FAILED:
                raise ValueError(
                    f"{self.title} gave no score for {MOST_FAILED} responses in a row, so "
                    f"on_failure={self.on_failure:g} would be all that is trained on. The first reason: "
                    f"{self.failed_in_a_row[0]}"
                ) from error
            return Unscored(self.on_failure, str(error))
        self.failed_in_a_row.clear()
        return score
