"""The sampler of a run whose prompts are chosen by rewards: it asks a `PromptSampler`, and checks what that answers."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from operator import index
from pathlib import Path
from typing import Any

from fivefold.config.user_code import user_traceback
from fivefold.data.prompt_sampler import PromptSampler
from fivefold.data.sampler import EpochSampler, Outcome, SamplerState
from fivefold.types import Prompt

N_TRIED = 3
"""Batches that are drawn from a user's sampler before the run, and again after its state was loaded."""


class ChosenSampler(EpochSampler[Prompt]):
    """Gives out the batches that a `PromptSampler` chooses.

    An epoch is as many batches as the prompts fill, whichever they are. Batches that were given out and whose
    rewards are not reported yet are part of the state, so that a run that reads ahead continues with the same ones.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        choice: PromptSampler,
        name: str,
        *,
        batch_size: int,
        shuffle: bool,
        seed: int,
        fingerprint: str,
    ) -> None:
        """Start at the first batch.

        Args:
            prompts: the data set.
            choice: chooses among them.
            name: the value of `train_dataset.sampler`, for messages.
            batch_size: number of prompts in a batch.
            shuffle: value of the recipe's key, which identifies the order.
            seed: seed of the recipe, which identifies the order.
            fingerprint: identifies the content of the data set, the sampler and its options.

        Raises:
            ValueError: fewer prompts than a batch has.
        """
        super().__init__(prompts, batch_size=batch_size, shuffle=shuffle, seed=seed, fingerprint=fingerprint)
        self._choice = choice
        self._name = f"train_dataset.sampler={name}"
        self._waiting: list[int] = []
        """Prompts that were chosen for batches of a checkpoint and are to be given out again, the next one first."""
        self._given: deque[list[int]] = deque()
        """Batches that were given out and whose rewards are not reported yet, the oldest first."""

    @property
    def n_dropped(self) -> int:
        """Return 0: no prompt is left out for its place at the end of an epoch."""
        return 0

    def next_batch(self) -> list[Prompt]:
        """Return the next prompts.

        Raises:
            ValueError: the sampler failed, or did not choose `batch_size` different prompts of the data set.
        """
        chosen = self._next_places()
        self._given.append(chosen)
        self._n_given += 1
        return [self._items[place] for place in chosen]

    def told(self, outcomes: Sequence[Outcome]) -> None:
        """Tell the sampler what the prompts of the oldest batch earned.

        Raises:
            ValueError: the sampler failed.
        """
        self._given.popleft()
        with failing_as(f"{self._name}: told failed"):
            self._choice.told(outcomes)

    def state_dict(self, ahead: int = 0) -> SamplerState:
        """Return the position, the state of the sampler, and the `ahead` last batches, which are given out again.

        Raises:
            ValueError: the sampler failed, or its state is not of values that JSON has.
        """
        with failing_as(f"{self._name}: state_dict failed"):
            choice = self._choice.state_dict()
        try:
            choice = json.loads(json.dumps(choice, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{self._name}: state_dict returned what JSON does not have ({error}): return numbers, texts, lists "
                "and dicts with texts as keys"
            ) from error
        last = list(self._given)[len(self._given) - ahead :]
        state = super().state_dict(ahead)
        state["chosen"] = {"state": choice, "waiting": [*chain(*last), *self._waiting]}
        return state

    def load_state_dict(self, state: SamplerState) -> None:
        """Continue exactly where the sampler of `state` stopped.

        Raises:
            ValueError: a state of another data set, sampler or seed, or one that the sampler refuses.
        """
        super().load_state_dict(state)
        chosen = state.get("chosen", {})
        if not chosen.keys() >= {"state", "waiting"}:
            raise ValueError(f"{self._name}: the saved position has no state of a sampler")
        with failing_as(f"{self._name}: load_state_dict failed"):
            self._choice.load_state_dict(chosen["state"])
        self._waiting, self._given = list(chosen["waiting"]), deque()

    def _next_places(self) -> list[int]:
        """Return a batch of what waits, filled up by the sampler; what is in the batch already stays in its place."""
        while len(places := dict.fromkeys(self._waiting)) < self._batch_size:
            self._waiting += self._choose()
        chosen = list(islice(places, self._batch_size))
        for place in chosen:
            self._waiting.remove(place)
        return chosen

    def _choose(self) -> list[int]:
        with failing_as(f"{self._name}: next_batch failed"):
            chosen = [index(place) for place in self._choice.next_batch()]
        size, n = self._batch_size, len(self._items)
        if len(chosen) != size or len(set(chosen)) != size or not all(0 <= place < n for place in chosen):
            raise ValueError(
                f"{self._name}: next_batch returned {chosen!r:.200}: return {size} different places (batch_size), each "
                f"from 0 to {n - 1}, for the data set has {n} prompts"
            )
        return chosen


def try_out(make: Callable[[], ChosenSampler]) -> None:
    """Draw batches from a user's sampler, report rewards to it, and check that it continues from its state.

    Args:
        make: makes the sampler, which is at its beginning.

    Raises:
        ValueError: it fails, or chooses other prompts after its state was loaded into another one.
    """
    first, second = make(), make()
    for number in range(N_TRIED):
        _step(first, number)
    second.load_state_dict(first.state_dict())
    for number in range(N_TRIED):
        mine, theirs = _step(first, number), _step(second, number)
        if mine != theirs:
            raise ValueError(
                f"{first._name}: with its state loaded, a sampler chose the prompts {theirs!r:.100}, and the one that "
                f"was saved {mine!r:.100}: let state_dict return all that changes with the calls, and draw random "
                "numbers from the seed"
            )


def _step(sampler: ChosenSampler, number: int) -> list[int]:
    """Draw a batch, and tell that every other prompt was answered rightly. Returns its places."""
    places = [prompt.index for prompt in sampler.next_batch()]
    rewards = [float((place + number) % 2) for place in places]
    sampler.told([Outcome(place, (reward,), reward) for place, reward in zip(places, rewards, strict=True)])
    return places


@contextmanager
def failing_as(what: str) -> Iterator[None]:
    """Turn what a user's code raises into a ValueError that says `what` failed, with the traceback."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        shown = user_traceback(error, [f"{Path(__file__).parent}/"])
        raise ValueError(f"{what}:\n{shown}") from error


def shown_options(name: str, options: Mapping[str, Any]) -> str:
    """Return a sampler's name and options as a text that identifies them."""
    return f"{name} {json.dumps(options, sort_keys=True, default=str)}"
