"""The protocol for what differs between inference servers: command line, requests, and how they load weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fivefold.rollout.protocol import GenerationRequest, SamplingParams
from fivefold.rollout.replica import ReplicaSpec
from fivefold.rollout.servers.client import HttpClient
from fivefold.types import FinishReason

REQUEST_SEEDS = 2**63
"""Seeds of requests are taken modulo this, because servers keep them in signed integers."""
SERVER_SEEDS = 2**31
"""The server's own seed is taken modulo this, because the server seeds every library with it."""


@dataclass(frozen=True)
class Answer:
    """The completion that a server sampled for one request."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason

    def __post_init__(self) -> None:
        # JSON has no NaN: servers write null or leave the number out.
        if len(self.logprobs) != len(self.token_ids) or not all(
            isinstance(value, int | float) for value in self.logprobs
        ):
            raise RuntimeError(
                f"the server answered {len(self.token_ids)} tokens with log-probs {self.logprobs}: every token needs a "
                "number, and logits that are not finite (NaN or infinite) give none"
            )


def finish_reason(said: str | None) -> FinishReason:
    """Return the reason that a server gives for a completion's end.

    Raises:
        RuntimeError: the completion is not whole, as after an abort, which servers report with the status of a success.
    """
    reasons: dict[str | None, FinishReason] = {"stop": "stop", "length": "length"}
    if said not in reasons:
        raise RuntimeError(f"the server ended a completion with {said!r}: it is not whole")
    return reasons[said]


class Dialect(Protocol):
    """Speaks to one kind of server."""

    module: str
    """Module that `python -m` starts."""
    generate_path: str
    """Path to which requests are posted."""
    environment: Mapping[str, str]
    """Environment variables of the server process, besides those that it inherits."""
    aliases: frozenset[str]
    """Other names of the arguments that `arguments` gives."""

    def arguments(self, spec: ReplicaSpec, port: int) -> list[str]:
        """Return the command line after the module, without the further arguments of the recipe."""

    def request(
        self, request: GenerationRequest, sampling: SamplingParams, end_token_ids: Sequence[int]
    ) -> dict[str, Any]:
        """Return the body to post to `generate_path`."""

    def answer(self, reply: Any) -> Answer:
        """Return the completion in a reply from `generate_path`."""

    def load(self, http: HttpClient, folder: Path, version: int) -> None:
        """Make the server load all weights from a Hugging Face folder, and drop what it has cached with others."""

    def sleep(self, http: HttpClient) -> None:
        """Make the server give back the device memory of its weights and its cache."""

    def wake(self, http: HttpClient) -> None:
        """Make the server take that device memory again."""
