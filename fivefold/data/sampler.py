"""The order in which a data set is read, which depends on (seed, epoch, position) alone."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NotRequired, TypedDict, TypeVar

Item = TypeVar("Item")


class SamplerState(TypedDict):
    """The state from which a sampler can continue, as plain values that JSON has."""

    seed: int
    shuffle: bool
    batch_size: int
    n_items: int
    fingerprint: str
    epoch: int
    position: int
    chosen: NotRequired[dict[str, Any]]
    """What a sampler that chooses by rewards needs besides (`ChosenSampler`)."""


@dataclass(frozen=True)
class Outcome:
    """What the completions of a prompt earned in a step."""

    index: int
    """Place of the prompt in the data set."""
    rewards: tuple[float, ...]
    """The reward of each completion that is trained on: the weighted sum, if there are several."""
    pass_rate: float
    """Share of the completions that count as right."""


class EpochSampler(Generic[Item]):
    """Gives out batches of `batch_size` items, epoch after epoch, without end.

    Each epoch has its own permutation (`shuffle`), or the order of the data set. Within an epoch no item comes twice,
    and no batch mixes two epochs: the `n_dropped` items at the end of an epoch that do not fill a batch are left out,
    and the next shuffle leaves out others.
    """

    def __init__(
        self, items: Sequence[Item], *, batch_size: int, shuffle: bool, seed: int, fingerprint: str = ""
    ) -> None:
        """Start at the first batch.

        Args:
            items: the data set.
            batch_size: number of items in a batch.
            shuffle: whether each epoch has its own order.
            seed: seed of these orders.
            fingerprint: identifies the content of the data set; a state loads only if it has the same fingerprint.

        Raises:
            ValueError: fewer items than a batch has.
        """
        if batch_size > len(items):
            raise ValueError(
                f"batch_size={batch_size} is more than the data set has usable rows, {len(items)}: "
                "lower batch_size, or add rows"
            )
        self._items = items
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._fingerprint = fingerprint
        self.epoch = 0
        """Epoch of the next batch, from 0."""
        self.position = 0
        """Number of batches of this epoch that have been given out."""
        self._order: list[int] = []
        self._ordered_epoch: int | None = None

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches in an epoch."""
        return len(self._items) // self._batch_size

    @property
    def n_dropped(self) -> int:
        """Number of items that each epoch leaves out, because they do not fill a batch."""
        return len(self._items) % self._batch_size

    def next_batch(self) -> list[Item]:
        """Return the next `batch_size` items."""
        start = self.position * self._batch_size
        if self._ordered_epoch != self.epoch:
            self._order, self._ordered_epoch = self._order_of(self.epoch), self.epoch
        batch = [self._items[i] for i in self._order[start : start + self._batch_size]]
        self._advance()
        return batch

    def _advance(self) -> None:
        """Count a batch that is given out."""
        self.position += 1
        if self.position == self.batches_per_epoch:
            self.epoch, self.position = self.epoch + 1, 0

    def told(self, outcomes: Sequence[Outcome]) -> None:
        """Take note of what the prompts of a batch earned, the oldest batch first whose rewards are not reported yet.

        The order of an epoch does not depend on it.
        """

    def state_dict(self, ahead: int = 0) -> SamplerState:
        """Return the position in the data set, and what identifies the data set and its order.

        Args:
            ahead: number of the last batches that were given out and are not used yet: the position is before them.
        """
        return self._state_after(self.epoch * self.batches_per_epoch + self.position - ahead)

    def _state_after(self, n_batches: int) -> SamplerState:
        """Return the state after so many batches."""
        epoch, position = divmod(n_batches, self.batches_per_epoch)
        return SamplerState(
            seed=self._seed,
            shuffle=self._shuffle,
            batch_size=self._batch_size,
            n_items=len(self._items),
            fingerprint=self._fingerprint,
            epoch=epoch,
            position=position,
        )

    def load_state_dict(self, state: SamplerState) -> None:
        """Continue exactly where the sampler of `state` stopped.

        Raises:
            ValueError: a state of another data set, batch size, order or seed.
        """
        here = self._state_after(self.epoch * self.batches_per_epoch + self.position)
        resumed = SamplerState(**{**here, "epoch": state["epoch"], "position": state["position"]})
        differing = sorted(key for key, value in resumed.items() if state.get(key) != value)
        if differing:
            found = ", ".join(f"{key}={state.get(key)!r} (now {here.get(key)!r})" for key in differing)
            raise ValueError(
                f"the saved reading position belongs to another data set or order: {found}; "
                "resume with the same train_dataset and seed"
            )
        self.epoch, self.position = state["epoch"], state["position"]

    def _order_of(self, epoch: int) -> list[int]:
        return shuffled(range(len(self._items)), self._seed, str(epoch), self._shuffle)


def shuffled(places: Iterable[int], seed: int, name: str, is_random: bool) -> list[int]:
    """Return places in the order of the name under a seed; otherwise than `is_random`, in their own order."""
    order = list(places)
    if is_random:
        # random hashes a string with SHA-512, so that neighbouring seeds and epochs give unrelated orders.
        random.Random(f"{seed}-{name}").shuffle(order)
    return order
