"""The order in which a data set is read, which depends on the seed and on the rows read before alone."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NotRequired, TypeVar

# pydantic, which reads a state, needs this one before Python 3.12.
from typing_extensions import TypedDict

Item = TypeVar("Item")


class SamplerState(TypedDict):
    """The state from which a sampler can continue, as plain values that JSON has."""

    seed: int
    shuffle: bool
    n_items: int
    fingerprint: str
    batches: list[list[int]]
    """Batches so far, as [batch size, number of batches], in their order: a run may have changed the size."""
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
        self._earlier: list[list[int]] = []
        """Batches of other sizes that were given out before, as in `SamplerState`."""
        self._n_given = 0
        """Batches of this size that have been given out."""
        self._order: list[int] = []
        self._ordered_epoch: int | None = None

    @property
    def n_items(self) -> int:
        """Number of items of the data set."""
        return len(self._items)

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches in an epoch."""
        return len(self._items) // self._batch_size

    @property
    def n_dropped(self) -> int:
        """Number of items that each epoch leaves out, because they do not fill a batch."""
        return len(self._items) % self._batch_size

    @property
    def place(self) -> tuple[int, int]:
        """Epoch of the next batch, from 0, and the number of rows before it in this epoch."""
        return place_after([*self._earlier, [self._batch_size, self._n_given]], len(self._items))

    def next_batch(self) -> list[Item]:
        """Return the next `batch_size` items."""
        epoch, row = self.place
        if self._ordered_epoch != epoch:
            self._order, self._ordered_epoch = self._order_of(epoch), epoch
        self._n_given += 1
        return [self._items[i] for i in self._order[row : row + self._batch_size]]

    def told(self, outcomes: Sequence[Outcome]) -> None:
        """Take note of what the prompts of a batch earned, the oldest batch first whose rewards are not reported yet.

        The order of an epoch does not depend on it.
        """

    def state_dict(self, ahead: int = 0) -> SamplerState:
        """Return the position in the data set, and what identifies the data set and its order.

        Args:
            ahead: number of the last batches that were given out and are not used yet: the position is before them.
        """
        return SamplerState(
            seed=self._seed,
            shuffle=self._shuffle,
            n_items=len(self._items),
            fingerprint=self._fingerprint,
            batches=[*self._earlier, [self._batch_size, self._n_given - ahead]],
        )

    def load_state_dict(self, state: SamplerState) -> None:
        """Continue exactly where the sampler of `state` stopped, which may have had another batch size.

        Raises:
            ValueError: a state of another data set, order or seed.
        """
        here: Mapping[str, object] = EpochSampler.state_dict(self)
        differing = sorted(key for key, value in here.items() if key != "batches" and state.get(key) != value)
        if differing:
            found = ", ".join(f"{key}={state.get(key)!r} (now {here.get(key)!r})" for key in differing)
            raise ValueError(
                f"the saved reading position belongs to another data set or order: {found}; "
                "resume with the same train_dataset and seed"
            )
        self._earlier, self._n_given = [list(each) for each in state["batches"]], 0
        if self._earlier[-1][0] == self._batch_size:
            _, self._n_given = self._earlier.pop()
        elif self._earlier[-1][1] == 0:
            self._earlier.pop()

    def _order_of(self, epoch: int) -> list[int]:
        return shuffled(range(len(self._items)), self._seed, str(epoch), self._shuffle)


def place_after(batches: Iterable[Sequence[int]], n_items: int) -> tuple[int, int]:
    """Return the epoch, from 0, and the row in it at which the next batch begins.

    A batch that would end behind its epoch's last row begins the next epoch instead.

    Args:
        batches: [batch size, number of batches] in their order; the last size is the next batch's.
        n_items: rows of an epoch.
    """
    epoch = row = 0
    for size, n in batches:
        rest = (n_items - row) // size
        if n < rest:
            row += n * size
            continue
        more, n = divmod(n - rest, n_items // size)
        epoch, row = epoch + 1 + more, n * size
    return epoch, row


def shuffled(places: Iterable[int], seed: int, name: str, is_random: bool) -> list[int]:
    """Return places in the order of the name under a seed; otherwise than `is_random`, in their own order."""
    order = list(places)
    if is_random:
        # random hashes a string with SHA-512, so that neighbouring seeds and epochs give unrelated orders.
        random.Random(f"{seed}-{name}").shuffle(order)
    return order
