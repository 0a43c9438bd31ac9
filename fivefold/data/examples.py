"""Tokenized examples of a data set, whatever a model learns from them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from fivefold.config.schema.data import BatchesConfig
from fivefold.data.rows import drawn_apart, fingerprint, usage
from fivefold.data.sampler import EpochSampler


class Example(Protocol):
    """What a model learns from one row: one sequence of tokens, or several."""

    @property
    def n_tokens(self) -> int:
        """Tokens of its longest sequence."""

    def parts(self) -> Iterator[tuple[int, ...]]:
        """Yield whole numbers that together identify the example."""


Item = TypeVar("Item", bound=Example)


@dataclass(frozen=True)
class Examples(Generic[Item]):
    """The examples that are short enough, and the number of those that are not."""

    examples: tuple[Item, ...]
    rows: tuple[int, ...]
    """The row of each example; a conversation may be several."""
    n_rows: int
    """Number of rows that were read."""
    n_too_long: int
    """Number of rows that were dropped because an example of theirs has more than `max_length` tokens."""

    def __len__(self) -> int:
        return len(self.examples)

    def held_apart(self, hold_out: float, seed: int) -> tuple[Examples[Item], Examples[Item]]:
        """Return the examples to train on, and those that `train_dataset.hold_out` holds out, by rows.

        Raises:
            ValueError: there is one row alone, or all are held out.
        """
        rows = sorted(set(self.rows))
        held = {rows[place] for place in drawn_apart(len(rows), hold_out, seed)}
        n = len(held)
        return self._of(set(rows) - held, self.n_rows - n, self.n_too_long), self._of(held, n, 0)

    def _of(self, rows: Collection[int], n_rows: int, n_too_long: int) -> Examples[Item]:
        """Return the examples of some of the rows."""
        chosen = [(item, row) for item, row in zip(self.examples, self.rows, strict=True) if row in rows]
        return Examples(tuple(item for item, _ in chosen), tuple(row for _, row in chosen), n_rows, n_too_long)

    @property
    def usage(self) -> str:
        """The number of rows used, read and too long, as a text for the user."""
        return usage(self.n_rows - self.n_too_long, self.n_rows, self.n_too_long)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(example.n_tokens for example in self.examples)

    @property
    def largest_token(self) -> int:
        """The largest token of all examples."""
        return max(max(ids) for example in self.examples for ids in example.parts())

    def sampler(self, config: BatchesConfig, seed: int) -> EpochSampler[Item]:
        """Return a sampler of lists of `config.batch_size` examples."""
        return EpochSampler(
            self.examples,
            batch_size=config.batch_size,
            shuffle=config.shuffle,
            seed=seed,
            fingerprint=self.fingerprint(),
        )

    def fingerprint(self) -> str:
        """Return a hash of all examples in their order, by which a resumed run recognises the data set."""
        return fingerprint(ids for example in self.examples for ids in example.parts())


def require_examples(examples: list[Item], n_rows: int, path: str | list[str], max_length: int) -> None:
    """Check that some example was short enough.

    Raises:
        ValueError: there is none.
    """
    if not examples:
        raise ValueError(
            f"all {n_rows} examples of {path!r} have more than max_length={max_length} tokens: raise max_length"
        )
