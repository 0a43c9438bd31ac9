"""How one parameter of an engine and its Hugging Face tensors turn into each other.

    Hugging Face tensors <──pieces: rectangles of this rank──> parameter (a shard)
    Hugging Face tensors <──merge── [n, *local shape] <──all-gather── parameter (a shard, or some of its experts)

A mapping knows names, shapes and slices; it never communicates. `domain` says over which ranks the shards of a
parameter are spread: `replicated` (one shard), `tensor` (n = tp, in rank order), or `expert` (n = ep * etp, ep
outermost). Whatever has a parameter's shape has its pieces and can be merged: weights, gradients, an optimizer's
moments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, Protocol

from torch import Tensor

from fivefold.bridge.groups import ShardGroups
from fivefold.bridge.pieces import Piece
from fivefold.weights.stream import Stack, alone

Shape = tuple[int, ...]
Domain = Literal["replicated", "tensor", "expert"]


class StoredTensors(Protocol):
    """Names, shapes and files of a model's tensors."""

    @property
    def folder(self) -> Path:
        """The model's folder, which errors name."""
        ...

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        ...

    def file(self, name: str) -> str:
        """Return the name of the file that holds a tensor, which errors name."""
        ...


class TensorReader(StoredTensors, Protocol):
    """A model's tensors by Hugging Face name, from a folder or drawn at random."""

    def read(self, name: str, *index: slice) -> Tensor:
        """Return the tensor `name`, or the part of it that `index` selects along its first dimensions."""
        ...


def padded_vocab(vocab: int, tp_size: int) -> int:
    """Return the rows of the vocabulary-parallel weights: the vocabulary, padded to a multiple of `tp_size`."""
    return -(-vocab // tp_size) * tp_size


def _share(total: int, parts: int, what: str) -> int:
    if total % parts:
        raise ValueError(f"{what}: {total} does not divide into {parts} equal shards; choose a size that divides it")
    return total // parts


def _rows(name: str, shape: Shape, first: int, count: int, start: int = 0) -> Piece:
    """Return the piece that is `count` rows of a tensor, from row `first` on."""
    return Piece(name, shape, (first, *(0 for _ in shape[1:])), (count, *shape[1:]), start)


def _columns(name: str, shape: tuple[int, int], rank: int, size: int, start: int = 0) -> Piece:
    """Return the piece that is the columns of rank `rank` of `size`."""
    width = shape[1] // size
    return Piece(name, shape, (0, rank * width), (shape[0], width), start)


@dataclass(frozen=True)
class WeightMapping(ABC):
    """One parameter of an engine and the Hugging Face tensors it is made of."""

    domain: ClassVar[Domain]
    keeps_float32: ClassVar[bool] = False
    """Whether its tensors are float32 whatever the dtype of the model."""

    parameter: str
    """Name of the parameter: Megatron-Core's, with global layer numbers; on FSDP that of transformers."""

    @abstractmethod
    def hf_shapes(self) -> dict[str, Shape]:
        """Return the full shape of each Hugging Face tensor, in the order in which `merge` yields them."""

    def sources(self) -> Collection[str]:
        """Return the names of the Hugging Face tensors that `fill` reads."""
        return self.hf_shapes()

    @abstractmethod
    def local_shape(self, groups: ShardGroups) -> Shape:
        """Return the shape of a rank's shard.

        Raises:
            ValueError: the sizes do not divide.
        """

    @abstractmethod
    def pieces(self, groups: ShardGroups) -> Iterator[Piece]:
        """Yield the pieces of this rank's shard in the order in which they lie in it; padding is in none of them."""

    def stored_pieces(self, groups: ShardGroups) -> Iterator[Piece]:
        """Yield the pieces that this rank stores. Those of all ranks that shard a parameter tile its tensors once."""
        yield from self.pieces(groups)

    def fill(self, parameter: Tensor, reader: TensorReader, groups: ShardGroups) -> None:
        """Copy this rank's pieces into `parameter` ([local_shape]), converting to its dtype; padding becomes zero."""
        by_name: dict[str, list[Piece]] = {}
        covered = 0
        for piece in self.pieces(groups):
            by_name.setdefault(piece.name, []).append(piece)
            parameter.view(-1)[covered : piece.start].zero_()
            covered = piece.end
        parameter.view(-1)[covered:].zero_()
        for name, pieces in by_name.items():
            # One read for all pieces of a tensor, because random weights draw the whole tensor at each read.
            first, last = pieces[0].offsets[0], pieces[-1].offsets[0] + pieces[-1].sizes[0]
            rows = reader.read(name, slice(first, last), *pieces[0].index[1:])
            for piece in pieces:
                piece.view(parameter).copy_(rows[piece.offsets[0] - first :][: piece.sizes[0]])

    def fill_range(self, values_N: Tensor, begin: int, reader: TensorReader, groups: ShardGroups) -> None:
        """Copy the elements of this rank's flattened shard from `begin` on into `values_N`; padding becomes zero."""
        values_N.zero_()
        for piece in self.pieces(groups):
            for cut in piece.within(begin, begin + values_N.numel()):
                cut.view(values_N, begin).copy_(reader.read(cut.name, *cut.index))

    @abstractmethod
    def merge(self, shards: Tensor, first: int = 0) -> Iterator[Stack]:
        """Yield the full Hugging Face tensors of shards, as views of them where that is possible; experts in stacks.

        Args:
            shards: [n, *local_shape]; or of experts' parameters [n, some of a shard's experts, ...].
            first: number of the first of these experts in each shard.
        """

    def exists(self, groups: ShardGroups) -> bool:
        """Return whether a model of this layout has the parameter, on one stage or another."""
        return True

    def n_shards(self, groups: ShardGroups) -> int:
        """Return over how many ranks of one pipeline stage the parameter is cut."""
        return {"replicated": 1, "tensor": groups.tp_size, "expert": groups.ep_size * groups.etp_size}[self.domain]


@dataclass(frozen=True)
class Replicated(WeightMapping):
    """A tensor that every rank of a stage has whole: norms, routers, the shared expert's gate."""

    domain = "replicated"

    hf: str
    shape: Shape

    def hf_shapes(self) -> dict[str, Shape]:
        return {self.hf: self.shape}

    def local_shape(self, groups: ShardGroups) -> Shape:
        return self.shape

    def pieces(self, groups: ShardGroups) -> Iterator[Piece]:
        yield _rows(self.hf, self.shape, 0, self.shape[0])

    def stored_pieces(self, groups: ShardGroups) -> Iterator[Piece]:
        if groups.tp_rank == 0:
            yield from self.pieces(groups)

    def merge(self, shards: Tensor, first: int = 0) -> Iterator[Stack]:
        yield alone(self.hf, shards[0])


@dataclass(frozen=True)
class ExpertBias(Replicated):
    """Offsets of the experts' scores, which no gradient changes."""

    keeps_float32 = True


@dataclass(frozen=True)
class Row(WeightMapping):
    """A weight [out, in] whose input features are cut over tensor parallelism."""

    domain = "tensor"

    hf: str
    shape: tuple[int, int]

    def hf_shapes(self) -> dict[str, Shape]:
        return {self.hf: self.shape}

    def local_shape(self, groups: ShardGroups) -> Shape:
        return (self.shape[0], _share(self.shape[1], groups.tp_size, self.parameter))

    def pieces(self, groups: ShardGroups) -> Iterator[Piece]:
        yield _columns(self.hf, self.shape, groups.tp_rank, groups.tp_size)

    def merge(self, shards: Tensor, first: int = 0) -> Iterator[Stack]:
        yield alone(self.hf, shards.movedim(0, 1).flatten(1))


@dataclass(frozen=True)
class Column(WeightMapping):
    """A weight [out, in] or a bias [out] whose output features are cut over tensor parallelism."""

    domain = "tensor"

    hf: str
    shape: Shape

    def hf_shapes(self) -> dict[str, Shape]:
        return {self.hf: self.shape}

    def local_shape(self, groups: ShardGroups) -> Shape:
        return (_share(self.shape[0], groups.tp_size, self.parameter), *self.shape[1:])

    def pieces(self, groups: ShardGroups) -> Iterator[Piece]:
        rows, *_ = self.local_shape(groups)
        yield _rows(self.hf, self.shape, groups.tp_rank * rows, rows)

    def merge(self, shards: Tensor, first: int = 0) -> Iterator[Stack]:
        yield alone(self.hf, shards.flatten(0, 1))


@dataclass(frozen=True)
class VocabParallel(WeightMapping):
    """Vocabulary rows [vocab, hidden] cut over tensor parallelism, padded with zero rows to a multiple of tp."""

    domain = "tensor"

    hf: str
    shape: tuple[int, int]

    def hf_shapes(self) -> dict[str, Shape]:
        return {self.hf: self.shape}

    def local_shape(self, groups: ShardGroups) -> Shape:
        return (padded_vocab(self.shape[0], groups.tp_size) // groups.tp_size, self.shape[1])

    def pieces(self, groups: ShardGroups) -> Iterator[Piece]:
        width, _ = self.local_shape(groups)
        first = groups.tp_rank * width
        if first < self.shape[0]:
            yield _rows(self.hf, self.shape, first, min(width, self.shape[0] - first))

    def merge(self, shards: Tensor, first: int = 0) -> Iterator[Stack]:
        yield alone(self.hf, shards.flatten(0, 1)[: self.shape[0]])


@dataclass(frozen=True)
class TiedOutput(VocabParallel):
    """The last stage's copy of a tied embedding, which only a pipeline has; the first stage's copy is exported."""

    def exists(self, groups: ShardGroups) -> bool:
        return groups.pp_size > 1

    def hf_shapes(self) -> dict[str, Shape]:
        return {}

    def sources(self) -> Collection[str]:
        return (self.hf,)

    def stored_pieces(self, groups: ShardGroups) -> Iterator[Piece]:
        yield from ()

    def merge(self, shards: Tensor, first: int = 0) -> Iterator[Stack]:
        yield from ()


@dataclass(frozen=True)
class QKV(WeightMapping):
    """Query, key and value projections in one parameter, grouped by key/value head.

    Rows of one group: its n_heads / n_kv_heads query heads, its key head, its value head. Tensor parallelism cuts
    between groups. `features` is the shape behind the rows: (hidden,) for the weight, () for the bias.
    """

    domain = "tensor"

    q: str
    k: str
    v: str
    n_heads: int
    n_kv_heads: int
    head_dim: int
    features: Shape

    @property
    def _queries(self) -> int:
        return _share(self.n_heads, self.n_kv_heads, f"{self.parameter}: query heads over key/value heads")

    def hf_shapes(self) -> dict[str, Shape]:
        kv = (self.n_kv_heads * self.head_dim, *self.features)
        return {self.q: (self.n_heads * self.head_dim, *self.features), self.k: kv, self.v: kv}

    def local_shape(self, groups: ShardGroups) -> Shape:
        kv_heads = _share(self.n_kv_heads, groups.tp_size, f"{self.parameter}: key/value heads")
        return (kv_heads * (self._queries + 2) * self.head_dim, *self.features)

    def pieces(self, groups: ShardGroups) -> Iterator[Piece]:
        kv_heads = self.n_kv_heads // groups.tp_size
        start = 0
        for group in range(groups.tp_rank * kv_heads, (groups.tp_rank + 1) * kv_heads):
            for (name, shape), heads in zip(self.hf_shapes().items(), (self._queries, 1, 1), strict=True):
                rows = heads * self.head_dim
                piece = _rows(name, shape, group * rows, rows, start)
                yield piece
                start = piece.end

    def merge(self, shards: Tensor, first: int = 0) -> Iterator[Stack]:
        grouped = shards.reshape(self.n_kv_heads, self._queries + 2, self.head_dim, *self.features)
        yield alone(self.q, grouped[:, : self._queries].flatten(0, 2))
        yield alone(self.k, grouped[:, self._queries].flatten(0, 1))
        yield alone(self.v, grouped[:, self._queries + 1].flatten(0, 1))


@dataclass(frozen=True)
class GatedMLP(WeightMapping):
    """Gate and up projections in one parameter; rank r of tensor parallelism holds [gate shard r; up shard r]."""

    domain = "tensor"

    gate: str
    up: str
    shape: tuple[int, int]
    """Shape of one projection: [ffn hidden, hidden]."""

    def hf_shapes(self) -> dict[str, Shape]:
        return {self.gate: self.shape, self.up: self.shape}

    def local_shape(self, groups: ShardGroups) -> Shape:
        return (2 * _share(self.shape[0], groups.tp_size, self.parameter), self.shape[1])

    def pieces(self, groups: ShardGroups) -> Iterator[Piece]:
        rows = self.shape[0] // groups.tp_size
        for name, start in ((self.gate, 0), (self.up, rows * self.shape[1])):
            yield _rows(name, self.shape, groups.tp_rank * rows, rows, start)

    def merge(self, shards: Tensor, first: int = 0) -> Iterator[Stack]:
        halves = shards.view(len(shards), 2, -1, self.shape[1])
        yield alone(self.gate, halves[:, 0].flatten(0, 1))
        yield alone(self.up, halves[:, 1].flatten(0, 1))


@dataclass(frozen=True)
class ExpertGatedMLP(WeightMapping):
    """Gate and up projections of all experts: [experts, gate; up, hidden], cut over EP and ETP.

    `gate` and `up` are patterns with an `{expert}` field.
    """

    domain = "expert"

    gate: str
    up: str
    n_experts: int
    shape: tuple[int, int]
    """Shape of one expert's projection: [expert ffn hidden, hidden]."""

    def hf_shapes(self) -> dict[str, Shape]:
        names = (p.format(expert=e) for e in range(self.n_experts) for p in (self.gate, self.up))
        return dict.fromkeys(names, self.shape)

    def local_shape(self, groups: ShardGroups) -> Shape:
        experts = _share(self.n_experts, groups.ep_size, f"{self.parameter}: experts")
        rows = _share(self.shape[0], groups.etp_size, f"{self.parameter}: expert ffn hidden")
        return (experts, 2 * rows, self.shape[1])

    def pieces(self, groups: ShardGroups) -> Iterator[Piece]:
        experts, rows = self.n_experts // groups.ep_size, self.shape[0] // groups.etp_size
        start = 0
        for expert in range(groups.ep_rank * experts, (groups.ep_rank + 1) * experts):
            for pattern in (self.gate, self.up):
                name = pattern.format(expert=expert)
                piece = _rows(name, self.shape, groups.etp_rank * rows, rows, start)
                yield piece
                start = piece.end

    def merge(self, shards: Tensor, first: int = 0) -> Iterator[Stack]:
        etp_size = 2 * self.shape[0] // shards.shape[2]
        for experts, fused in _by_rank(shards, self.n_experts, etp_size, first):
            names = [pattern.format(expert=expert) for expert in experts for pattern in (self.gate, self.up)]
            halves = fused.view(etp_size, 2 * len(experts), -1, self.shape[1])
            yield Stack(names, halves.movedim(0, 1).flatten(1, 2))


@dataclass(frozen=True)
class ExpertRow(WeightMapping):
    """Down projections of all experts: [experts, hidden, expert ffn hidden], cut over EP and ETP."""

    domain = "expert"

    down: str
    n_experts: int
    shape: tuple[int, int]
    """Shape of one expert's projection: [hidden, expert ffn hidden]."""

    def hf_shapes(self) -> dict[str, Shape]:
        return {self.down.format(expert=e): self.shape for e in range(self.n_experts)}

    def local_shape(self, groups: ShardGroups) -> Shape:
        experts = _share(self.n_experts, groups.ep_size, f"{self.parameter}: experts")
        columns = _share(self.shape[1], groups.etp_size, f"{self.parameter}: expert ffn hidden")
        return (experts, self.shape[0], columns)

    def pieces(self, groups: ShardGroups) -> Iterator[Piece]:
        experts = self.n_experts // groups.ep_size
        start = 0
        for expert in range(groups.ep_rank * experts, (groups.ep_rank + 1) * experts):
            name = self.down.format(expert=expert)
            piece = _columns(name, self.shape, groups.etp_rank, groups.etp_size, start)
            yield piece
            start = piece.end

    def merge(self, shards: Tensor, first: int = 0) -> Iterator[Stack]:
        etp_size = self.shape[1] // shards.shape[3]
        for experts, weights in _by_rank(shards, self.n_experts, etp_size, first):
            names = [self.down.format(expert=expert) for expert in experts]
            yield Stack(names, weights.permute(1, 2, 0, 3).flatten(2))


def _by_rank(shards: Tensor, n_experts: int, etp_size: int, first: int) -> Iterator[tuple[range, Tensor]]:
    """Yield the numbers of each expert-parallel rank's experts in [ep * etp, experts, ...], and their shards.

    The experts are those of each rank from its own number `first` on, and their shards [etp, experts, ...].
    """
    ep_size = len(shards) // etp_size
    per_rank = n_experts // ep_size
    for ep_rank, rank_shards in enumerate(shards.view(ep_size, etp_size, *shards.shape[1:])):
        start = ep_rank * per_rank + first
        yield range(start, start + shards.shape[1]), rank_shards
