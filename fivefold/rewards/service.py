"""What rewards have in common that ask a service: its limits, and what becomes of a response without a score."""

from __future__ import annotations

import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from fivefold.rewards.http_client import HTTPClient, RequestFailed, check_address
from fivefold.rewards.unscored import Unscored

MOST_AT_ONCE = 1024
MOST_FAILED = 64
"""Responses in a row without a score, after which the run ends though `on_failure` is given, in the midst of a step."""
_URL = re.compile(r"https?://(\[[\da-fA-F:.]+\]|[^\s/:?#\[\]@]+)(:\d{1,5})?(/[^\s?#]*)?")


def check_url(key: str, url: str) -> None:
    """Refuse a value of `reward.kwargs` that is no URL.

    Raises:
        ValueError: it is none.
    """
    if not _URL.fullmatch(url):
        raise ValueError(f"reward.kwargs.{key}={url!r} must be a URL such as http://localhost:8000/v1")


def check_reachable(key: str, url: str) -> None:
    """Refuse a service that cannot be reached from this machine.

    Raises:
        ValueError: nothing listens at its address.
    """
    try:
        check_address(url)
    except ValueError as error:
        raise ValueError(
            f"reward.kwargs.{key}={url!r}: {error}. Start the service first, or correct the URL"
        ) from error


class Question(Protocol):
    """What a service sees of a prompt. A prompt itself needs torch, which a plan does without."""

    @property
    def text(self) -> str:
        """The prompt as the model in training sees it."""

    @property
    def ground_truth(self) -> Any:
        """The ground truth."""

    @property
    def data_source(self) -> str:
        """Name of the data set or task."""

    @property
    def extra_info(self) -> Mapping[str, Any]:
        """The row's `extra_info`."""


@dataclass(frozen=True, kw_only=True)
class Service(ABC):
    """A service that scores responses, and the keys of `reward.kwargs` that all of them have."""

    api_key_env: str | None = None
    """Environment variable that holds the API key; None: the service needs none."""
    scale: float = 1.0
    """Factor from the score to the reward: 0.1 for scores from 0 to 10."""
    timeout_s: float = 60.0
    """Seconds of one attempt."""
    retries: int = 3
    """Further attempts after a time-out, a broken connection, status 408, 429 or 5xx, or an answer without a score."""
    backoff_s: float = 1.0
    """Seconds before the second attempt, about; they double with each further one."""
    concurrency: int = 32
    """Requests at the same time."""
    on_failure: float | None = None
    """Reward of a response for which all attempts failed; None: the run ends. It also ends after `MOST_FAILED` such
    responses in a row, and after a step without any other."""
    failed_in_a_row: list[str] = field(default_factory=list, init=False, repr=False, compare=False)
    """Why the last responses had no score, since the last one that had."""

    @property
    @abstractmethod
    def address(self) -> tuple[str, str]:
        """The key of the service's address, and its value."""

    @property
    def endpoint(self) -> str:
        """The URL that is asked."""
        return self.address[1]

    @property
    @abstractmethod
    def title(self) -> str:
        """What messages call the service."""

    @abstractmethod
    def judge_prompt(self, prompt: Question, response: str) -> float:
        """Return the score of one response, times `scale`.

        Raises:
            ValueError: the service gave no score and `on_failure` is None, or it refuses every request.
        """

    def __post_init__(self) -> None:
        """Check the arguments.

        Raises:
            ValueError: one that cannot work.
        """
        check_url(*self.address)
        for name, (least, most) in self._bounds():
            if not least <= (value := getattr(self, name)) <= most:
                raise ValueError(f"reward.kwargs.{name}={value} must be from {least:g} to {most:,g}")
        for name in ("scale", "on_failure"):
            if (number := getattr(self, name)) is not None and not math.isfinite(number):
                raise ValueError(f"reward.kwargs.{name}={number} must be a finite number")

    def _bounds(self) -> Iterator[tuple[str, tuple[float, float]]]:
        """Yield the names of numbers, each with the least and the largest value."""
        yield "timeout_s", (0.001, 86_400)
        yield "retries", (0, 100)
        yield "backoff_s", (0, 3600)
        yield "concurrency", (1, MOST_AT_ONCE)

    @property
    def n_at_once(self) -> int:
        """Number of responses that can be judged at the same time, each from a separate thread."""
        return self.concurrency

    def check_machine(self) -> None:
        """Refuse a machine without the API key, or from which the service cannot be reached.

        Raises:
            ValueError: the environment variable is not set, or nothing listens at the address.
        """
        if self.api_key_env is not None and not os.environ.get(self.api_key_env):
            raise ValueError(
                f"reward.kwargs.api_key_env={self.api_key_env}: this environment variable is not set: export it where "
                "fivefold starts, or drop api_key_env if the service needs no key"
            )
        check_reachable(*self.address)

    def check_ground_truth(self, ground_truth: Any) -> None:  # noqa: B027 - there is nothing to refuse
        """Accept every ground truth: it is only shown to the service."""

    def asked(self, body: Mapping[str, Any], read: Callable[[bytes], float]) -> float:
        """Return the reward that `read` finds in the reply to `body`, or `on_failure`.

        Raises:
            ValueError: see `judge_prompt`.
        """
        try:
            score = self._client.ask(body, read)
        except RequestFailed as error:
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

    @cached_property
    def _client(self) -> HTTPClient:
        key = os.environ.get(self.api_key_env) if self.api_key_env is not None else None
        return HTTPClient(self.endpoint, key, self.timeout_s, self.retries, self.backoff_s, self.concurrency)
