"""What differs between inference servers: their command lines, their requests, and how they take weights."""

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
"""Seeds of requests are folded to below this: servers keep them in signed integers."""
SERVER_SEEDS = 2**31
"""And the server's own to below this: it seeds every library that it finds."""


@dataclass(frozen=True)
class Answer:
    """What a server sampled for one request."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason

    def __post_init__(self) -> None:
        # JSON has no NaN: servers write null, or nothing.
        if len(self.logprobs) != len(self.token_ids) or not all(
            isinstance(value, int | float) for value in self.logprobs
        ):
            raise RuntimeError(
                f"the server answered {len(self.token_ids)} tokens with log-probs {self.logprobs}: one number each is "
                "wanted, and none of them comes from logits that are not finite"
            )


def finish_reason(said: str | None) -> FinishReason:
    """What a server said of a completion's end.

    Raises:
        RuntimeError: the completion is not whole, as after an abort, which servers report as a success.
    """
    reasons: dict[str | None, FinishReason] = {"stop": "stop", "length": "length"}
    if said not in reasons:
        raise RuntimeError(f"the server ended a completion with {said!r}: it is not whole")
    return reasons[said]


class Dialect(Protocol):
    """How to speak to one kind of server."""

    module: str
    """Started with `python -m`."""
    generate_path: str
    environment: Mapping[str, str]
    """Of the server process, besides what it inherits."""
    aliases: frozenset[str]
    """Other names of what `arguments` gives."""

    def arguments(self, spec: ReplicaSpec, port: int) -> list[str]:
        """The command line after the module, without the recipe's own arguments."""

    def request(
        self, request: GenerationRequest, sampling: SamplingParams, end_token_ids: Sequence[int]
    ) -> dict[str, Any]:
        """The body to post to `generate_path`."""

    def answer(self, reply: Any) -> Answer:
        """What a reply from `generate_path` says."""

    def load(self, http: HttpClient, folder: Path, version: int) -> None:
        """Have all weights replaced by those in a Hugging Face folder, and what was computed with others dropped."""

    def sleep(self, http: HttpClient) -> None:
        """Have the device memory of weights and cache given back."""

    def wake(self, http: HttpClient) -> None:
        """Have it taken again."""
