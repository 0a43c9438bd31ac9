"""The contract between an environment, which plays episodes, and the engine that answers it.

Task ──> environment.run(task, client) ──> Episode
              │ await client.complete(token_ids)  ^
              v                                   │
          one request ──────> engine ──────> one completion
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fivefold.rollout.protocol import GenerationRequest, SamplingParams
from fivefold.types import Completion, Episode, PlacedImage, Prompt


@dataclass(frozen=True)
class Task:
    """One episode to play. The episodes of a group have the same prompt and different seeds."""

    prompt: Prompt
    request: GenerationRequest
    """The first request: the prompt's tokens, the episode's seed, and what an earlier attempt left of its answer."""
    sampling: SamplingParams
    """How completions are sampled, unless the environment asks otherwise."""
    images: tuple[PlacedImage, ...] = ()
    """The prompt's images."""


class Client(Protocol):
    """What an environment has of the engine: a session that belongs to one episode."""

    async def complete(self, token_ids: Sequence[int], sampling: SamplingParams | None = None) -> Completion:
        """Sample one completion.

        Weights may change while it is sampled: each of its tokens carries the version that sampled it.

        Args:
            token_ids: all tokens before the completion. The first call of an episode gives the prompt's.
            sampling: how tokens are chosen; None: as the task says.
        """


class Environment(Protocol):
    """Plays episodes, many at a time, in the process of a rollout replica."""

    async def run(self, task: Task, client: Client) -> Episode:
        """Play one episode.

        It must depend on the task and on the completions alone: an episode whose replica dies is played again.
        """
