"""A curriculum: passes over the prompts from easy to hard, without those that are too easy or too hard to teach."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, SkipValidation

from fivefold.data.sampler import Outcome, shuffled
from fivefold.types import Prompt

Share = Annotated[float, Field(ge=0, le=1)]


@dataclass
class EasyToHard:
    """Easy prompts first (Kimi k1.5, arXiv 2501.12599), within a window of pass rates (Bae et al., arXiv 2504.03380).

    p, the pass rate of a prompt, follows the share of its completions that count as right:

        p <- p + rate (share - p)      the first share is p itself

    A pass reads each prompt with lowest <= p <= highest once, in the order of falling p. Every `retry_every`-th pass
    reads all prompts. A prompt that was not tried has the p that its data tell, or the middle of the window; of equals,
    the less difficult comes first, then chance decides, or with `shuffle: false` the place in the data set. If the
    window has fewer prompts than a batch, those nearest to it fill the batch.
    """

    prompts: SkipValidation[Sequence[Prompt]]
    batch_size: int
    shuffle: bool
    seed: int
    lowest: Share = 0.1
    """Least pass rate of a prompt that is read."""
    highest: Share = 0.9
    """Largest pass rate of a prompt that is read."""
    rate: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Weight of the newest share in the pass rate."""
    retry_every: Annotated[int, Field(ge=1, le=1_000_000)] = 4
    """Passes from one that reads all prompts to the next; 1: every pass does."""
    pass_rate_key: str | None = None
    """Key of `extra_info` with a pass rate that is known before the run, from 0 to 1."""
    difficulty_key: str | None = None
    """Key of `extra_info` with a number that is larger for more difficult prompts."""

    def __post_init__(self) -> None:
        if self.lowest > self.highest:
            raise ValueError(
                f"train_dataset.sampler_kwargs.lowest={self.lowest} is above highest={self.highest}: lower the first"
            )
        self._pass_rates: dict[int, float] = {}
        """Pass rates of the prompts that were tried."""
        self._known = self._column("pass_rate_key", self.pass_rate_key, (self.lowest + self.highest) / 2)
        self._difficulty = self._column("difficulty_key", self.difficulty_key, 0.0)
        if strays := [value for value in self._known if not 0 <= value <= 1]:
            raise ValueError(
                f"train_dataset.sampler_kwargs.pass_rate_key={self.pass_rate_key}: a prompt has {strays[0]}, and a "
                "pass rate is from 0 to 1"
            )
        self._n_passes = 0
        """Number of passes that have begun."""
        self._left: list[int] = []
        """Prompts of the pass that are still to come, the next one last."""

    def next_batch(self) -> Sequence[int]:
        """Return the next prompts of the pass; a batch may end with the first ones of the next pass."""
        chosen: dict[int, None] = {}
        while len(chosen) < self.batch_size:
            if not self._left:
                self._begin_pass()
            chosen[self._left.pop()] = None
        return list(chosen)

    def told(self, outcomes: Sequence[Outcome]) -> None:
        """Let the pass rates follow what prompts earned."""
        for outcome in outcomes:
            before = self._pass_rates.get(outcome.index, outcome.pass_rate)
            self._pass_rates[outcome.index] = before + self.rate * (outcome.pass_rate - before)

    def state_dict(self) -> Mapping[str, Any]:
        """Return the pass rates that were measured, and what is left of the pass."""
        rates = {str(place): value for place, value in self._pass_rates.items()}
        return {"passes": self._n_passes, "left": self._left, "pass_rates": rates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the sampler of `state` was."""
        self._n_passes, self._left = state["passes"], list(state["left"])
        self._pass_rates = {int(place): value for place, value in state["pass_rates"].items()}

    def _begin_pass(self) -> None:
        self._n_passes += 1
        n = len(self.prompts)
        beyond = [self._beyond(place) for place in range(n)]
        reads_all = self._n_passes % self.retry_every == 0
        due = [place for place in range(n) if reads_all or beyond[place] == 0]
        if len(due) < self.batch_size:
            due = sorted(range(n), key=lambda place: beyond[place])[: self.batch_size]
        mixed = shuffled(due, self.seed, f"pass {self._n_passes}", self.shuffle)
        # Python sorts stably, so that equals stay as they were mixed.
        self._left = sorted(mixed, key=lambda place: (-self._pass_rate(place), self._difficulty[place]))[::-1]

    def _pass_rate(self, place: int) -> float:
        return self._pass_rates.get(place, self._known[place])

    def _beyond(self, place: int) -> float:
        """Return how far a prompt's pass rate is out of the window; 0: it is in the window."""
        return max(self.lowest - self._pass_rate(place), self._pass_rate(place) - self.highest, 0.0)

    def _column(self, option: str, key: str | None, otherwise: float) -> list[float]:
        """Return a number of each prompt's `extra_info`; without a key, `otherwise` for all."""
        if key is None:
            return [otherwise] * len(self.prompts)
        values = [prompt.extra_info.get(key) for prompt in self.prompts]
        numbers = [float(value) for value in values if isinstance(value, (int, float)) and math.isfinite(value)]
        if len(numbers) < len(values):
            raise ValueError(
                f"train_dataset.sampler_kwargs.{option}={key}: {len(values) - len(numbers)} of {len(values)} prompts "
                "have no number under this key of their column extra_info: add it, or drop the option"
            )
        return numbers
