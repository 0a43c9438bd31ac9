"""A step's sequences by reference: the driver knows their sizes, and the trainer's processes read their tokens.

    driver     RemoteBatch: lengths, one number a sequence (advantages), and references to pieces
                  │ plan: which sequences each replica trains
                  v
    rank       ShareOrder, and the pieces that hold its replica's sequences ──assemble──> Share ──> engine

A piece holds columns of some of the sequences, as the process that made them left them in the object store: tokens of
a rollout replica, log-probs of a trainer's replica. No piece passes through the driver.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fivefold.algorithms.imitation import EXPERT
from fivefold.batch import Batch, Columns, RowImages, Totals, joined_cuts
from fivefold.cluster.group import Remote, fetch, put
from fivefold.engine.packing import BatchPlan, MicroBatches, Share
from fivefold.types import ROUTES, UNKNOWN_EXPERT, Cuts, PlacedImage

Indices = npt.NDArray[np.int64]

KEPT = "kept"
"""Name of the scalar that is 0 for sequences without trained tokens, else 1."""


@dataclass(frozen=True, eq=False)
class Piece:
    """Columns of M sequences, which may belong to a batch."""

    columns: Remote
    """A `Columns` in the object store."""
    sequences_M: Indices
    """Index in the batch of each of the piece's sequences; -1: not in the batch."""


@dataclass(frozen=True, eq=False)
class Spans:
    """Values of spans of tokens of N rows, such as the advantage of each move; all other tokens have 0.

    They travel as they are, because a column of all tokens would grow with their number, in the driver too.
    """

    rows_N: tuple[Sequence[tuple[int, int, float]], ...]
    """(place of the first token in the row, number of tokens, value) of each span of each row."""
    dtype: npt.DTypeLike
    """Dtype of the column."""

    def select(self, indices: Iterable[int]) -> Spans:
        """Return the rows at `indices`, in that order."""
        return Spans(tuple(self.rows_N[index] for index in indices), self.dtype)

    def column(self, lengths_N: Indices) -> npt.NDArray[Any]:
        """Return the column [tokens of all rows] of rows of these lengths, which lie end to end."""
        column_T = np.zeros(int(lengths_N.sum()), self.dtype)
        for begin, row in zip((np.cumsum(lengths_N) - lengths_N).tolist(), self.rows_N, strict=True):
            for start, n_tokens, value in row:
                column_T[begin + start : begin + start + n_tokens] = value
        return column_T


@dataclass(frozen=True, eq=False)
class RemoteBatch:
    """N rows by reference: their sizes, and pieces in the object store that hold their tokens.

    A row is a sequence, or the sequences of one episode, which stay together.
    """

    lengths_N: Indices
    """Tokens of each row."""
    trained_N: Indices
    """Trained tokens of each sequence."""
    pieces: tuple[Piece, ...]
    scalars: Mapping[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    """float32 [N] each, by name: values of whole sequences, which `assemble` gives to each of their tokens."""
    cuts: Cuts | None = None
    """Tokens of each sequence of each row; None: each row is one sequence."""
    spans: Mapping[str, Spans] = field(default_factory=dict)
    """Values of spans of tokens, by name, which `assemble` makes columns of."""

    @staticmethod
    def of(columns: Columns) -> RemoteBatch:
        """Put the columns of whole sequences, `tokens` and `mask` among them, into the object store."""
        starts = np.cumsum(columns.lengths_N, dtype=np.int64) - columns.lengths_N
        return RemoteBatch(
            lengths_N=columns.lengths_N.astype(np.int64),
            trained_N=np.add.reduceat(columns.values["mask"].astype(np.int64), starts),
            pieces=(Piece(put(columns), np.arange(len(columns.lengths_N))),),
            cuts=columns.cuts,
        )

    def __len__(self) -> int:
        return len(self.lengths_N)

    @property
    def n_tokens(self) -> int:
        """All tokens, prompts included."""
        return int(self.lengths_N.sum())

    @property
    def sequence_lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return self.lengths_N.tolist() if self.cuts is None else [length for row in self.cuts for length in row]

    def totals(self) -> Totals:
        """Return the sizes of this batch, which must be a whole mini-batch if a loss is to be divided by them."""
        trained = self.trained_N
        return Totals(len(self), self.n_tokens, int(trained.sum()), int((trained > 0).sum()))

    def with_pieces(self, pieces: Sequence[Piece]) -> RemoteBatch:
        """Return a copy with further columns."""
        return replace(self, pieces=(*self.pieces, *pieces))

    def with_scalars(self, **scalars: npt.NDArray[np.float32]) -> RemoteBatch:
        """Return a copy with further values of whole sequences."""
        return replace(self, scalars={**self.scalars, **scalars})

    def with_spans(self, **spans: Spans) -> RemoteBatch:
        """Return a copy with further values of spans of tokens."""
        return replace(self, spans={**self.spans, **spans})

    def untrained(self, indices: Sequence[int]) -> RemoteBatch:
        """Return a copy in which no token of the sequences at `indices` is trained."""
        trained_N = self.trained_N.copy()
        kept_N = self.scalars.get(KEPT, np.ones(len(self), np.float32)).copy()
        trained_N[list(indices)] = kept_N[list(indices)] = 0
        return replace(self, trained_N=trained_N, scalars={**self.scalars, KEPT: kept_N})

    @staticmethod
    def joined(batches: Sequence[RemoteBatch]) -> RemoteBatch:
        """Return the sequences of several batches without scalars and spans, one batch after the other."""
        pieces: dict[int, Piece] = {}
        start = 0
        for batch in batches:
            place_N = np.arange(start, start + len(batch))
            for piece in batch.pieces:
                own = Piece(piece.columns, _renumbered(piece.sequences_M, place_N))
                # Batches of one report share its columns, from which a replica then takes all that it needs at once.
                other = pieces.get(id(piece.columns), own)
                pieces[id(piece.columns)] = Piece(piece.columns, np.maximum(own.sequences_M, other.sequences_M))
            start += len(batch)
        return RemoteBatch(
            np.concatenate([batch.lengths_N for batch in batches]),
            np.concatenate([batch.trained_N for batch in batches]),
            tuple(pieces.values()),
            cuts=joined_cuts([(batch.lengths_N.tolist(), batch.cuts) for batch in batches]),
        )

    def select(self, indices: Sequence[int]) -> RemoteBatch:
        """Return the sequences at `indices`, in that order, with the pieces that have some of them."""
        chosen = np.asarray(indices, dtype=np.int64)
        place_N = _places(chosen, len(self))
        pieces = [Piece(piece.columns, _renumbered(piece.sequences_M, place_N)) for piece in self.pieces]
        return RemoteBatch(
            self.lengths_N[chosen],
            self.trained_N[chosen],
            tuple(piece for piece in pieces if (piece.sequences_M >= 0).any()),
            {name: values[chosen] for name, values in self.scalars.items()},
            None if self.cuts is None else tuple(self.cuts[index] for index in chosen),
            {name: spans.select(chosen) for name, spans in self.spans.items()},
        )

    def orders(self, plan: BatchPlan) -> list[tuple[ShareOrder, list[Remote]]]:
        """Return each data-parallel replica's order for its share, and references to the columns that it needs."""
        totals, picks = self.totals(), self._picks(plan)
        return [self._order(plan, replica, picks[replica], totals) for replica in range(len(plan.replicas))]

    def _picks(self, plan: BatchPlan) -> list[_Picks]:
        """Return what each replica takes out of the pieces.

        A server leaves a piece for each group, and each replica of the trainer leaves one. Looking at every piece for
        every replica would take the driver seconds on a large cluster.
        """
        replica_N, place_N = np.empty((2, len(self)), dtype=np.int64)
        for replica in range(len(plan.replicas)):
            own = np.array(plan.sequences(replica), dtype=np.int64)
            replica_N[own], place_N[own] = replica, np.arange(len(own))
        sequences_P = np.concatenate([piece.sequences_M for piece in self.pieces])
        sizes = [len(piece.sequences_M) for piece in self.pieces]
        rows_P = np.concatenate([np.arange(size) for size in sizes])
        pieces_P = np.repeat(np.arange(len(sizes)), sizes)
        (present,) = np.nonzero(sequences_P >= 0)
        by_replica = present[np.argsort(replica_N[sequences_P[present]], kind="stable")]
        counts = np.bincount(replica_N[sequences_P[present]], minlength=len(plan.replicas))
        return [
            _Picks(pieces_P[own], rows_P[own], place_N[sequences_P[own]])
            for own in np.split(by_replica, np.cumsum(counts)[:-1])
        ]

    def _order(self, plan: BatchPlan, replica: int, picks: _Picks, totals: Totals) -> tuple[ShareOrder, list[Remote]]:
        own = np.array(plan.sequences(replica), dtype=np.int64)
        has_samples = len(own) > 0 and (EXPERT not in self.scalars or bool((self.scalars[EXPERT][own] == 0).any()))
        counts = np.bincount(picks.pieces_R, minlength=len(self.pieces))
        # A replica without samples gets all pieces, so that its share has the same fields as the others.
        (needed,) = np.nonzero(counts) if has_samples else (np.arange(len(self.pieces)),)
        scalars = {name: values[own] for name, values in self.scalars.items()}
        order = ShareOrder(
            self.lengths_N[own],
            counts[needed],
            picks.rows_R,
            picks.places_R,
            scalars,
            plan.micro_batches(replica),
            plan.longest,
            totals,
            None if self.cuts is None else tuple(self.cuts[index] for index in own),
            {name: spans.select(own) for name, spans in self.spans.items()},
        )
        return order, [self.pieces[index].columns for index in needed]


@dataclass(frozen=True, eq=False)
class _Picks:
    """What a replica takes out of all pieces, piece by piece: R sequences, one for each piece that holds one."""

    pieces_R: Indices
    """Index of the piece."""
    rows_R: Indices
    """Index of the sequence in the piece."""
    places_R: Indices
    """Index of the sequence in the replica's share."""


def _places(chosen: Indices, n: int) -> Indices:
    """Return int64 [n]: the index of each sequence in `chosen`, -1 if it is not there."""
    place_N = np.full(n, -1, dtype=np.int64)
    place_N[chosen] = np.arange(len(chosen))
    return place_N


def _renumbered(sequences_M: Indices, place_N: Indices) -> Indices:
    """Return the new indices of a piece's sequences; -1 stays -1."""
    return np.where(sequences_M >= 0, place_N[sequences_M], -1)


@dataclass(frozen=True, eq=False)
class ShareOrder:
    """How to assemble a replica's share from columns. Every rank of the replica gets it, so it is a few arrays."""

    lengths: Indices
    """Tokens of each of the share's sequences."""
    counts: Indices
    """Number of sequences to take out of each `Columns`; they sum to R."""
    rows_R: Indices
    """Index of each of them in its columns."""
    places_R: Indices
    """Index of the same sequence in the share."""
    scalars: Mapping[str, npt.NDArray[np.float32]]
    """Values of the share's sequences, as in `RemoteBatch`."""
    micro_batches: MicroBatches
    longest: int
    totals: Totals
    cuts: Cuts | None = None
    """As in `RemoteBatch`."""
    spans: Mapping[str, Spans] = field(default_factory=dict)
    """As in `RemoteBatch`."""


def assemble(order: ShareOrder, columns: Sequence[Columns]) -> Share:
    """Assemble a replica's share.

    The columns `tokens` and `mask` become the batch's own, all others its fields, and so do spans. A value of a whole
    sequence becomes a field with that value on every token; `kept` is multiplied with the mask.
    """
    ends = np.cumsum(order.lengths)
    starts, total = ends - order.lengths, int(ends[-1]) if len(ends) else 0
    gathered: dict[str, npt.NDArray[Any]] = {
        "tokens": np.zeros(total, np.int32), "mask": np.zeros(total, np.bool_)
    }  # fmt: skip
    splits = np.cumsum(order.counts)[:-1]
    picks = zip(np.split(order.rows_R, splits), np.split(order.places_R, splits), strict=True)
    for (rows, places), source in zip(picks, columns, strict=True):
        source_ends = np.cumsum(source.lengths_N, dtype=np.int64)
        source_starts = source_ends - source.lengths_N
        for name, values_T in source.values.items():
            missing = UNKNOWN_EXPERT if name == ROUTES else 0
            target = gathered.setdefault(name, np.full((total, *values_T.shape[1:]), missing, values_T.dtype))
            for row, place in zip(rows, places, strict=True):
                target[starts[place] : ends[place]] = values_T[source_starts[row] : source_ends[row]]
    tokens_T = torch.from_numpy(gathered.pop("tokens")).long()
    mask_T = torch.from_numpy(gathered.pop("mask")).float()
    fields = {name: torch.from_numpy(values_T) for name, values_T in gathered.items()}
    fields |= {name: torch.from_numpy(np.repeat(values, order.lengths)) for name, values in order.scalars.items()}
    fields |= {name: torch.from_numpy(spans.column(order.lengths)) for name, spans in order.spans.items()}
    if KEPT in fields:
        mask_T = mask_T * fields.pop(KEPT)
    lengths = tuple(order.lengths.tolist())
    batch = Batch(lengths, tokens_T, mask_T, fields, order.cuts, _images(order, columns))
    return Share(batch, order.micro_batches, order.longest, order.totals)


def _images(order: ShareOrder, columns: Sequence[Columns]) -> RowImages | None:
    """Return the images of each of a share's sequences; None: there are none."""
    if all(source.images is None for source in columns):
        return None
    found: list[tuple[PlacedImage, ...]] = [()] * len(order.lengths)
    start = 0
    for count, source in zip(order.counts.tolist(), columns, strict=True):
        picks = slice(start, start + count)
        if source.images is not None:
            for row, place in zip(order.rows_R[picks], order.places_R[picks], strict=True):
                found[place] = source.images[row]
        start += count
    return tuple(found)


def read_columns(batch: RemoteBatch, n: int) -> list[dict[str, npt.NDArray[Any]]]:
    """Return the columns [tokens of the sequence] of each of the first `n` sequences of a batch by name, spans too.

    This is for logs: the pieces that hold these sequences come to this process.
    """
    found: list[dict[str, npt.NDArray[Any]]] = [{} for _ in range(min(n, len(batch)))]
    for piece in batch.pieces:
        (rows,) = np.nonzero((piece.sequences_M >= 0) & (piece.sequences_M < n))
        if not len(rows):
            continue
        columns: Columns = fetch(piece.columns)
        ends = np.cumsum(columns.lengths_N, dtype=np.int64)
        for row in rows:
            part = slice(ends[row] - columns.lengths_N[row], ends[row])
            found[piece.sequences_M[row]] |= {name: values_T[part] for name, values_T in columns.values.items()}
    for name, spans in batch.spans.items():
        for index, columns_of_row in enumerate(found):
            columns_of_row[name] = spans.select([index]).column(batch.lengths_N[index : index + 1])
    return found
