"""The reward `http`: a service scores each response that it gets by POST."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from fivefold.json_text import parsed
from fivefold.rewards.asking import Question
from fivefold.rewards.http_client import RequestFailed, shown
from fivefold.rewards.service import Service

FIELDS = ("prompt", "response", "ground_truth", "data_source", "extra_info")


@dataclass(frozen=True)
class HTTPReward(Service):
    """Sends a response as JSON, and takes the number in the reply for its reward."""

    url: str
    """Address of the service, such as `http://localhost:8000/score`."""
    fields: Mapping[str, str] = field(default_factory=lambda: {name: name for name in FIELDS})
    """What is sent: names in the request, each with one of `FIELDS`."""
    score: str = "score"
    """Name of the score in a reply that is an object. A reply may also be a number."""

    def __post_init__(self) -> None:
        """Check the arguments.

        Raises:
            ValueError: one that cannot work.
        """
        super().__post_init__()
        if strays := [value for value in self.fields.values() if value not in FIELDS]:
            raise ValueError(f"reward.kwargs.fields sends {strays[0]!r}, which is none of {', '.join(FIELDS)}")
        if "response" not in self.fields.values():
            raise ValueError("reward.kwargs.fields has no response, so every response would have the same score")

    @property
    def address(self) -> tuple[str, str]:
        """The key of the service's address, and its value."""
        return "url", self.url

    @property
    def title(self) -> str:
        """What messages call the service."""
        return "the service"

    def judge_prompt(self, prompt: Question, response: str) -> float:
        """Return the score of one response, times `scale`; see `Asking.judge_prompt`."""
        values = {
            "prompt": prompt.text,
            "response": response,
            "ground_truth": prompt.ground_truth,
            "data_source": prompt.data_source,
            "extra_info": dict(prompt.extra_info),
        }
        return self.asked({name: values[value] for name, value in self.fields.items()}, self._read)

    def _read(self, data: bytes) -> float:
        """Return the scaled score in a reply.

        Raises:
            RequestFailed: it has none.
        """
        try:
            reply = parsed(data)
        except ValueError as error:
            raise RequestFailed(f"the reply is no JSON: {shown(data)}", again=True) from error
        found = reply.get(self.score) if isinstance(reply, Mapping) else reply
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise RequestFailed(f"the reply has no number {self.score!r}: {shown(data)}", again=True)
        try:
            score = found * self.scale
        except OverflowError:  # an integer that no float holds
            score = math.inf
        if not math.isfinite(score):
            raise RequestFailed(f"the score is no finite number: {shown(data)}", again=True)
        return score
