"""Replay of prompts that were not answered rightly: they come again among fresh ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any

from pydantic import Field, SkipValidation

from fivefold.data.sampler import Outcome, shuffled
from fivefold.types import Prompt


@dataclass
class Replay:
    """Fresh prompts, epoch after epoch, and among them a share of those that failed.

    A prompt fails if the share of its completions that count as right is at most `at_most`. It then waits behind those
    that failed before it, and comes again, with new completions, up to `most_times` before its next epoch.
    """

    prompts: SkipValidation[Sequence[Prompt]]
    batch_size: int
    shuffle: bool
    seed: int
    share: Annotated[float, Field(gt=0, lt=1)] = 0.25
    """Largest share of a batch that has failed before; one prompt at least."""
    at_most: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Largest share of right completions with which a prompt fails; 0: none of them is right."""
    most_times: Annotated[int, Field(ge=1, le=1_000_000)] = 3
    """Most times that a prompt comes again before its next epoch."""

    def __post_init__(self) -> None:
        self._n_read = 0
        """Number of fresh prompts that were read, in all epochs."""
        self._order: list[int] = []
        self._ordered_epoch: int | None = None
        self._waiting: dict[int, None] = {}
        """Prompts that are to come again, the next one first."""
        self._failures: dict[int, int] = {}
        """How often prompts have failed since they were fresh."""

    def next_batch(self) -> Sequence[int]:
        """Return prompts that failed, as many as wait and have room, and fresh ones behind them."""
        n_again = max(1, int(self.share * self.batch_size))
        chosen = dict.fromkeys(islice(self._waiting, n_again))
        for place in chosen:
            del self._waiting[place]
        while len(chosen) < self.batch_size:
            place = self._next_fresh()
            if place not in chosen:
                chosen[place] = None
                self._waiting.pop(place, None)
                self._failures.pop(place, None)
        return list(chosen)

    def told(self, outcomes: Sequence[Outcome]) -> None:
        """Let the prompts wait that failed."""
        for outcome in outcomes:
            place, n_failures = outcome.index, self._failures.pop(outcome.index, 0) + 1
            self._waiting.pop(place, None)
            if outcome.pass_rate <= self.at_most and n_failures <= self.most_times:
                self._failures[place] = n_failures
                self._waiting[place] = None

    def state_dict(self) -> Mapping[str, Any]:
        """Return the position among the fresh prompts, and those that wait."""
        failures = {str(place): times for place, times in self._failures.items()}
        return {"read": self._n_read, "waiting": list(self._waiting), "failures": failures}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the sampler of `state` was."""
        self._n_read, self._waiting = state["read"], dict.fromkeys(state["waiting"])
        self._failures = {int(place): times for place, times in state["failures"].items()}

    def _next_fresh(self) -> int:
        epoch, position = divmod(self._n_read, len(self.prompts))
        if self._ordered_epoch != epoch:
            self._order = shuffled(range(len(self.prompts)), self.seed, str(epoch), self.shuffle)
            self._ordered_epoch = epoch
        self._n_read += 1
        return self._order[position]
