"""An engine over a server that answers by a formula: what the tests of server engines share."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from fivefold.bridge.hf_writer import save_hf
from fivefold.config.schema.rollout import GenerationConfig
from fivefold.rollout.engines import DIALECTS
from fivefold.rollout.protocol import GenerationRequest, SamplingParams
from fivefold.rollout.replica import ReplicaSpec
from fivefold.rollout.servers.engine import ServerEngine
from fivefold.types import Completion
from fivefold.weights.folder import PREFIX, SHARED_MEMORY, NodePlace
from tests.unit.rollout.fake_server import LONG, PATIENCE_S, Log

GENERATE = {"vllm": "/fivefold/generate", "sglang": "/generate"}
BEAT = {"vllm": "/fivefold/beat", "sglang": "/health_generate"}
BESIDE = 9000
"""Number of the first request that is submitted while others run."""
PROMPT = {"vllm": "token_ids", "sglang": "input_ids"}


def start(spec: ReplicaSpec) -> ServerEngine:
    save = partial(save_hf, config_source=spec.path, tokenizer_source=spec.tokenizer_path)
    return ServerEngine(DIALECTS[spec.backend], spec, NodePlace(spec.run, 0, 1), save)


@dataclass(frozen=True)
class Served:
    """An engine, its server's log and folder, and the weights that it is given."""

    spec: ReplicaSpec
    engine: ServerEngine
    folder: Path
    weights: dict[str, Tensor]

    @property
    def backend(self) -> str:
        return self.spec.backend

    @property
    def log(self) -> Log:
        return Log(self.folder)

    def update(self, version: int = 0) -> None:
        self.engine.update_weights(self.weights.items(), version)

    def bodies(self) -> list[Any]:
        """Bodies of all requests to generate so far."""
        path = GENERATE[self.backend]
        return [row["body"] for row in self.log.rows("request") if row["path"] == path]

    def n_long(self) -> int:
        """Number of requests to generate so far whose prompts begin with `LONG`."""
        return sum(body[PROMPT[self.backend]][0] == LONG for body in self.bodies())

    def wait_for_long(self, n: int) -> None:
        """Return once `n` requests whose prompts begin with `LONG` have come: the next pause cuts them short."""
        deadline = time.monotonic() + PATIENCE_S
        while self.n_long() < n:
            assert time.monotonic() < deadline, f"only {self.n_long()} of {n} requests have come"
            time.sleep(0.01)

    def posts_during(self, action: Callable[[], object]) -> list[str]:
        before = len(self.log.posts())
        action()
        return self.log.posts()[before:]

    def left_behind(self) -> list[Path]:
        """Folders of its updates that still exist."""
        return list(SHARED_MEMORY.glob(f"{PREFIX}{self.spec.run}*"))


def sampling(**options: Any) -> SamplingParams:
    return SamplingParams.from_config(GenerationConfig(**{"max_new_tokens": 12} | options))


def requests_of(n: int, first_token: int = 9) -> list[GenerationRequest]:
    return [GenerationRequest((first_token, *range(10, 11 + i % 5), 3 + i % 40), 1000 * i + i % 11) for i in range(n)]


def lose(engine: ServerEngine, requests: Mapping[int, GenerationRequest]) -> dict[int, GenerationRequest]:
    """Submit requests to a server that dies of them; return those that it has lost.

    The server may have answered some before it died. None of them may vanish.
    """
    for number, request in requests.items():
        engine.submit(number, request, sampling())
    answered: set[int] = set()
    deadline = time.monotonic() + PATIENCE_S
    while not (lost := engine.take_lost()):
        answered.update(number for number, _ in engine.collect(0.05))
        assert time.monotonic() < deadline
    assert lost.keys() | answered == requests.keys()
    return lost


def forget(engine: ServerEngine) -> None:
    """Forget the requests that a failed call has left."""
    engine._stream.lose()


def completed_beside(
    engine: ServerEngine, requests: Sequence[GenerationRequest], others: dict[int, Completion]
) -> list[Completion]:
    """Return completions of requests that are answered while others run; completions of the others go to `others`."""
    numbers = range(BESIDE, BESIDE + len(requests))
    for number, request in zip(numbers, requests, strict=True):
        engine.submit(number, request, sampling())
    while not others.keys() >= set(numbers):
        others |= dict(engine.collect(0.3))
    return [others.pop(number) for number in numbers]
