"""A step's sequences by reference: the driver knows their sizes, and the trainer's processes read their tokens.

    driver     RemoteBatch: lengths, one number a sequence (advantages), and references to pieces
                  │ plan: which sequences each replica trains
                  v
    rank       ShareOrder, and the pieces that hold its replica's sequences ──assemble──> Share ──> engine

A piece holds columns of some of the sequences, as the process that made them left them in the object store: a rollout
replica its tokens, a replica of the trainer its log-probs. No piece passes through the driver.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fivefold.cluster.group import Remote
from fivefold.engine.sharing import BatchPlan, MicroBatches, Share
from fivefold.types import Batch, Columns, Totals

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Piece:
    """Columns of M of a batch's sequences."""

    columns: Remote
    """A `Columns` in the object store."""
    sequences_M: Indices
    """Which sequence of the batch each of the piece's is; -1: none of them."""


@dataclass(frozen=True, eq=False)
class RemoteBatch:
    """N sequences whose tokens are elsewhere."""

    lengths_N: Indices
    """Tokens of each sequence."""
    trained_N: Indices
    """Trained tokens of each sequence."""
    pieces: tuple[Piece, ...]
    scalars: Mapping[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    """float32 [N] each, by name: numbers of whole sequences, which every token of the sequence gets as a field."""

    def __len__(self) -> int:
        return len(self.lengths_N)

    @property
    def n_tokens(self) -> int:
        """All tokens, prompts included."""
        return int(self.lengths_N.sum())

    def totals(self) -> Totals:
        """Its sizes, which are those of a mini-batch if it is a whole one."""
        trained = self.trained_N
        return Totals(len(self), self.n_tokens, int(trained.sum()), int((trained > 0).sum()))

    def with_pieces(self, pieces: Sequence[Piece]) -> RemoteBatch:
        """A copy with further columns."""
        return RemoteBatch(self.lengths_N, self.trained_N, (*self.pieces, *pieces), self.scalars)

    def with_scalars(self, **scalars: npt.NDArray[np.float32]) -> RemoteBatch:
        """A copy with further numbers of whole sequences."""
        return RemoteBatch(self.lengths_N, self.trained_N, self.pieces, {**self.scalars, **scalars})

    def select(self, indices: Sequence[int]) -> RemoteBatch:
        """The sequences at `indices`, in that order."""
        chosen = np.asarray(indices, dtype=np.int64)
        place_N = _places(chosen, len(self))
        return RemoteBatch(
            self.lengths_N[chosen],
            self.trained_N[chosen],
            tuple(Piece(piece.columns, _renumbered(piece.sequences_M, place_N)) for piece in self.pieces),
            {name: values[chosen] for name, values in self.scalars.items()},
        )

    def orders(self, plan: BatchPlan) -> list[tuple[ShareOrder, list[Remote]]]:
        """For each data-parallel replica: what its share is made of, and the columns to make it from."""
        totals = self.totals()
        return [self._order(plan, replica, totals) for replica in range(len(plan.replicas))]

    def _order(self, plan: BatchPlan, replica: int, totals: Totals) -> tuple[ShareOrder, list[Remote]]:
        own = np.array(plan.sequences(replica), dtype=np.int64)
        place_N = _places(own, len(self))
        picks, columns = [], []
        for piece in self.pieces:
            places_M = _renumbered(piece.sequences_M, place_N)
            (rows,) = np.nonzero(places_M >= 0)
            # A replica without sequences gets all pieces, for its empty share has the same fields as the others'.
            if len(rows) or not len(own):
                picks.append(Pick(rows, places_M[rows]))
                columns.append(piece.columns)
        scalars = {name: values[own] for name, values in self.scalars.items()}
        lengths = self.lengths_N[own]
        order = ShareOrder(lengths, tuple(picks), scalars, plan.micro_batches(replica), plan.longest, totals)
        return order, columns


def _places(chosen: Indices, n: int) -> Indices:
    """[n]: the place of each sequence in `chosen`, -1 where it is not there."""
    place_N = np.full(n, -1, dtype=np.int64)
    place_N[chosen] = np.arange(len(chosen))
    return place_N


def _renumbered(sequences_M: Indices, place_N: Indices) -> Indices:
    """The places of the sequences of a piece; -1 stays -1."""
    return np.where(sequences_M >= 0, place_N[sequences_M], -1)


@dataclass(frozen=True, eq=False)
class Pick:
    """Sequences to take out of one `Columns`."""

    rows: Indices
    """Which of its sequences."""
    places: Indices
    """Where they stand in the share."""


@dataclass(frozen=True, eq=False)
class ShareOrder:
    """How a replica's share is put together from columns. `picks` has one entry for each of them."""

    lengths: Indices
    """Tokens of each of the share's sequences."""
    picks: tuple[Pick, ...]
    scalars: Mapping[str, npt.NDArray[np.float32]]
    """As in `RemoteBatch`, of the share's sequences."""
    micro_batches: MicroBatches
    longest: int
    totals: Totals


def assemble(order: ShareOrder, columns: Sequence[Columns]) -> Share:
    """Put a replica's share together.

    The columns `tokens` and `mask` become the batch's own, all others its fields. A number of a whole sequence becomes
    a field that has it on every token.
    """
    ends = np.cumsum(order.lengths)
    starts, total = ends - order.lengths, int(ends[-1]) if len(ends) else 0
    gathered: dict[str, npt.NDArray[Any]] = {
        "tokens": np.zeros(total, np.int32), "mask": np.zeros(total, np.bool_)
    }  # fmt: skip
    for pick, source in zip(order.picks, columns, strict=True):
        source_ends = np.cumsum(source.lengths_N, dtype=np.int64)
        source_starts = source_ends - source.lengths_N
        for name, values_T in source.values.items():
            target = gathered.setdefault(name, np.zeros((total, *values_T.shape[1:]), values_T.dtype))
            for row, place in zip(pick.rows, pick.places, strict=True):
                target[starts[place] : ends[place]] = values_T[source_starts[row] : source_ends[row]]
    tokens_T = torch.from_numpy(gathered.pop("tokens")).long()
    mask_T = torch.from_numpy(gathered.pop("mask")).float()
    fields = {name: torch.from_numpy(values_T) for name, values_T in gathered.items()}
    fields |= {name: torch.from_numpy(np.repeat(values, order.lengths)) for name, values in order.scalars.items()}
    batch = Batch(tuple(order.lengths.tolist()), tokens_T, mask_T, fields)
    return Share(batch, order.micro_batches, order.longest, order.totals)
