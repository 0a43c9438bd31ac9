"""What rewards have in common that ask a service: its address, its key and its time limits."""

from __future__ import annotations

import os
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fivefold.rewards.asking import Asking
from fivefold.rewards.http_client import HTTPClient, check_address

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


@dataclass(frozen=True, kw_only=True)
class Service(Asking):
    """A service that scores responses, and the keys of `reward.kwargs` that all of them have.

    An attempt fails by a time-out, a broken connection, status 408, 429 or 5xx, or an answer without a score.
    """

    api_key_env: str | None = None
    """Environment variable that holds the API key; None: the service needs none."""
    timeout_s: float = 60.0
    """Seconds of one attempt."""
    backoff_s: float = 1.0
    """Seconds before the second attempt, about; they double with each further one."""

    @property
    @abstractmethod
    def address(self) -> tuple[str, str]:
        """The key of the service's address, and its value."""

    @property
    def endpoint(self) -> str:
        """The URL that is asked."""
        return self.address[1]

    def __post_init__(self) -> None:
        """Check the arguments.

        Raises:
            ValueError: one that cannot work.
        """
        check_url(*self.address)
        super().__post_init__()

    def _bounds(self) -> Iterator[tuple[str, tuple[float, float]]]:
        yield "timeout_s", (0.001, 86_400)
        yield "backoff_s", (0, 3600)
        yield from super()._bounds()

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

    def asked(self, body: Mapping[str, Any], read: Callable[[bytes], float]) -> float:
        """Return the reward that `read` finds in the reply to `body`, or `on_failure`.

        Raises:
            ValueError: see `judge_prompt`.
        """
        return self.scored(lambda: self._client.ask(body, read))

    @cached_property
    def _client(self) -> HTTPClient:
        key = os.environ.get(self.api_key_env) if self.api_key_env is not None else None
        return HTTPClient(self.endpoint, key, self.timeout_s, self.retries, self.backoff_s, self.concurrency)
