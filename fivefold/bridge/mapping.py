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
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fivefold.bridge.groups import ShardGroups
from fivefold.bridge.pieces import Piece
from fivefold.families.tensors import Shape, WeightTensor, joint_name
from fivefold.weights.stream import Stack, alone

Domain = Literal["replicated", "tensor", "expert"]


def padded_vocab(vocab: int, tp_size: int) -> int:
    """Return the rows of the vocabulary-parallel weights: the vocabulary, padded to a multiple of `tp_size`."""
    return -(-vocab // tp_size) * tp_size


def mapping_of(parameter: str, *tensors: WeightTensor, n_units: int | None = None) -> WeightMapping:
    """Return the mapping of a parameter that holds `tensors`, cut alike; `n_units` as in `Column`."""
    if tensors[0].n_experts is not None:
        match tensors[0].cut:
            case "rows":
                return ExpertColumn(parameter, tensors)
            case "columns":
                return ExpertRow(parameter, tensors)
        return ExpertBias(parameter, tensors) if tensors[0].is_joint else ExpertWhole(parameter, tensors)
    match tensors[0].cut:
        case "whole":
            return Replicated(parameter, tensors)
        case "rows":
            return Column(parameter, tensors, n_units)
        case "columns":
            return Row(parameter, tensors)
        case "vocabulary":
            return VocabParallel(parameter, tensors)


@dataclass(frozen=True)
class WeightMapping(ABC):
    """One parameter of an engine and the Hugging Face tensors it is made of."""

    domain: ClassVar[Domain]

    parameter: str
    """Name of the parameter: Megatron-Core's, with global layer numbers; on FSDP, the name in transformers."""
    tensors: tuple[WeightTensor, ...]

    @property
    def is_adapter(self) -> bool:
        """Whether the parameter is part of an adapter, which only the training engine has."""
        return self.tensors[0].adapts is not None

    @property
    def is_whole(self) -> bool:
        """Whether tensor parallelism leaves the parameter whole."""
        return self.tensors[0].cut == "whole"

    @property
    def is_joint(self) -> bool:
        """Whether files hold the tensors of all experts in one."""
        return self.tensors[0].is_joint

    @property
    def keeps_float32(self) -> bool:
        """Whether the parameter is float32 whatever the dtype of the model."""
        return self.tensors[0].keeps_float32

    def hf_shapes(self) -> dict[str, Shape]:
        """Return the full shape of each Hugging Face tensor, in the order in which `merge` yields them."""
        by_expert = zip(*(tensor.names for tensor in self.tensors), strict=True)
        shapes = [tensor.shape for tensor in self.tensors]
        return {name: shape for names in by_expert for name, shape in zip(names, shapes, strict=True)}

    def file_shapes(self) -> dict[str, Shape]:
        """Return the name and full shape of each tensor in files, in the order in which `merged` yields them."""
        if not self.is_joint:
            return self.hf_shapes()
        return {name: full for tensor in self.tensors for name, full in tensor.in_files.items()}

    def sources(self) -> Collection[str]:
        """Return the names of the Hugging Face tensors that are read to fill the parameter."""
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
        """Yield the pieces that this rank stores. Over all ranks that shard a parameter, they tile its tensors once."""
        yield from self.pieces(groups)

    @abstractmethod
    def merge(self, shards: Tensor, first: int = 0) -> Iterator[Stack]:
        """Yield the full Hugging Face tensors of shards, as views of them where that is possible; experts in stacks.

        Args:
            shards: [n, *local_shape]; or of experts' parameters [n, some of a shard's experts, ...].
            first: number of the first of these experts in each shard.
        """

    def merged(self, shards: Tensor, first: int = 0) -> Iterator[Stack]:
        """Yield the tensors of shards as files hold them; of experts that are in one, `shards` must hold all."""
        if not self.is_joint:
            yield from self.merge(shards, first)
            return
        stacks = [stack.tensors for stack in self.merge(shards)]
        yield alone(joint_name(self.tensors[0].name), torch.cat(stacks) if len(stacks) > 1 else stacks[0])

    def exists(self, groups: ShardGroups) -> bool:
        """Return whether a model of this layout has the parameter, on one stage or another."""
        return True

    def n_shards(self, groups: ShardGroups) -> int:
        """Return over how many ranks of one pipeline stage the parameter is cut."""
        return {"replicated": 1, "tensor": groups.tp_size, "expert": groups.ep_size * groups.etp_size}[self.domain]

    def _share(self, total: int, parts: int, what: str = "") -> int:
        """Return a rank's part of `total` rows, columns or experts.

        Raises:
            ValueError: it does not divide.
        """
        if total % parts:
            where = f"{self.parameter}: {what}" if what else self.parameter
            raise ValueError(
                f"{where}: {total} does not divide into {parts} equal shards; choose a size that divides it"
            )
        return total // parts


def _rows(name: str, shape: Shape, first: int, count: int, start: int = 0) -> Piece:
    """Return the piece that is `count` rows of a tensor, from row `first` on."""
    return Piece(name, shape, (first, *(0 for _ in shape[1:])), (count, *shape[1:]), start)


def _columns(name: str, shape: Shape, rank: int, size: int, start: int = 0) -> Piece:
    """Return the piece that is the columns of rank `rank` of `size`."""
    width = shape[1] // size
    return Piece(name, shape, (0, rank * width), (shape[0], width), start)


class Replicated(WeightMapping):
    """A tensor that every rank of a stage has whole: norms, routers and their offsets, the shared expert's gate."""

    domain = "replicated"

    def local_shape(self, groups: ShardGroups) -> Shape:
        return self.tensors[0].shape

    def pieces(self, groups: ShardGroups) -> Iterator[Piece]:
        [tensor] = self.tensors
        yield _rows(tensor.name, tensor.shape, 0, tensor.shape[0])

    def stored_pieces(self, groups: ShardGroups) -> Iterator[Piece]:
        if groups.tp_rank == 0:
            yield from self.pieces(groups)

    def merge(self, shards: Tensor, first: int = 0) -> Iterator[Stack]:
        yield alone(self.tensors[0].name, shards[0])


class Row(WeightMapping):
    """A weight [out, in] whose input features are cut over tensor parallelism."""

    domain = "tensor"

    def local_shape(self, groups: ShardGroups) -> Shape:
        rows, columns = self.tensors[0].shape
        return (rows, self._share(columns, groups.tp_size))

    def pieces(self, groups: ShardGroups) -> Iterator[Piece]:
        [tensor] = self.tensors
        yield _columns(tensor.name, tensor.shape, groups.tp_rank, groups.tp_size)

    def merge(self, shards: Tensor, first: int = 0) -> Iterator[Stack]:
        yield alone(self.tensors[0].name, shards.movedim(0, 1).flatten(1))


@dataclass(frozen=True)
class Column(WeightMapping):
    """Weights [out, in] or biases [out] in one parameter, whose output features are cut over tensor parallelism.

    The parameter is a run of units, and a unit has an equal part of each tensor. Tensor parallelism cuts between units.

        one tensor     a rank's rows
        gate, up       [gate rows of rank r; up rows of rank r]
        q, k, v        for each key/value head: its query heads, its key head, its value head

    Of a tensor that is several runs of rows, a unit has an equal part of each run.
    """

    domain = "tensor"

    n_units: int | None = None
    """Units on all ranks, which are the key/value heads; None: one a rank."""

    def _runs(self) -> Iterator[tuple[WeightTensor, int, int]]:
        """Yield (tensor, its first row, its rows) of each run of the tensors."""
        for tensor in self.tensors:
            first = 0
            for rows in tensor.runs or tensor.shape[:1]:
                yield tensor, first, rows
                first += rows

    def _units(self, groups: ShardGroups) -> int:
        return self.n_units or groups.tp_size

    def local_shape(self, groups: ShardGroups) -> Shape:
        if self.n_units is not None:
            self._share(self.n_units, groups.tp_size, "key/value heads")
        rows = sum(self._share(rows, self._units(groups)) for _, _, rows in self._runs())
        return (rows * self._units(groups) // groups.tp_size, *self.tensors[0].shape[1:])

    def pieces(self, groups: ShardGroups) -> Iterator[Piece]:
        own, start = self._units(groups) // groups.tp_size, 0
        for unit in range(groups.tp_rank * own, (groups.tp_rank + 1) * own):
            for tensor, first, rows in self._runs():
                share = rows // self._units(groups)
                piece = _rows(tensor.name, tensor.shape, first + unit * share, share, start)
                yield piece
                start = piece.end

    def merge(self, shards: Tensor, first: int = 0) -> Iterator[Stack]:
        n_units = self.n_units or len(shards)
        units = shards.reshape(n_units, -1, *shards.shape[2:])
        parts = iter(units.split([rows // n_units for _, _, rows in self._runs()], dim=1))
        for tensor in self.tensors:
            runs = [next(parts).flatten(0, 1) for _ in tensor.runs or (tensor.shape[0],)]
            yield alone(tensor.name, torch.cat(runs) if len(runs) > 1 else runs[0])


class VocabParallel(WeightMapping):
    """Vocabulary rows [vocab, hidden] cut over tensor parallelism, padded with zero rows to a multiple of tp."""

    domain = "tensor"

    def local_shape(self, groups: ShardGroups) -> Shape:
        vocab, hidden = self.tensors[0].shape
        return (padded_vocab(vocab, groups.tp_size) // groups.tp_size, hidden)

    def pieces(self, groups: ShardGroups) -> Iterator[Piece]:
        [tensor] = self.tensors
        width, _ = self.local_shape(groups)
        first = groups.tp_rank * width
        if first < tensor.shape[0]:
            yield _rows(tensor.name, tensor.shape, first, min(width, tensor.shape[0] - first))

    def merge(self, shards: Tensor, first: int = 0) -> Iterator[Stack]:
        [tensor] = self.tensors
        yield alone(tensor.name, shards.flatten(0, 1)[: tensor.shape[0]])


class TiedOutput(VocabParallel):
    """The last stage's copy of a tied embedding, which only a pipeline has; the first stage's copy is exported."""

    def exists(self, groups: ShardGroups) -> bool:
        return groups.pp_size > 1

    def hf_shapes(self) -> dict[str, Shape]:
        return {}

    def sources(self) -> Collection[str]:
        return self.tensors[0].names

    def stored_pieces(self, groups: ShardGroups) -> Iterator[Piece]:
        yield from ()

    def merge(self, shards: Tensor, first: int = 0) -> Iterator[Stack]:
        yield from ()


class _Experts(WeightMapping):
    """Tensors of all experts, [experts, ...], cut over EP by experts and over ETP within each."""

    domain = "expert"

    def _own(self, groups: ShardGroups) -> range:
        """Return the numbers of a rank's experts."""
        [n_experts] = {tensor.n_experts or 0 for tensor in self.tensors}
        count = self._share(n_experts, groups.ep_size, "experts")
        return range(groups.ep_rank * count, (groups.ep_rank + 1) * count)

    def _by_rank(self, shards: Tensor, etp_size: int, first: int) -> Iterator[tuple[list[str], Tensor]]:
        """Yield the names of each expert-parallel rank's tensors in [ep * etp, experts, ...], and their shards.

        They begin with each rank's expert number `first`; their shards are [etp, experts, ...].
        """
        ep_size, n_experts = len(shards) // etp_size, self.tensors[0].n_experts or 0
        for ep_rank, rank_shards in enumerate(shards.view(ep_size, etp_size, *shards.shape[1:])):
            start = ep_rank * (n_experts // ep_size) + first
            experts = range(start, start + shards.shape[1])
            yield [tensor.name.format(expert=expert) for expert in experts for tensor in self.tensors], rank_shards


class ExpertColumn(_Experts):
    """Tensors of all experts that are cut by rows: gate and up projections, [experts, gate; up, hidden], or biases."""

    def local_shape(self, groups: ShardGroups) -> Shape:
        rows = sum(self._share(tensor.shape[0], groups.etp_size, "expert ffn hidden") for tensor in self.tensors)
        return (len(self._own(groups)), rows, *self.tensors[0].shape[1:])

    def pieces(self, groups: ShardGroups) -> Iterator[Piece]:
        start = 0
        for expert in self._own(groups):
            for tensor in self.tensors:
                rows = tensor.shape[0] // groups.etp_size
                name = tensor.name.format(expert=expert)
                piece = _rows(name, tensor.shape, groups.etp_rank * rows, rows, start)
                yield piece
                start = piece.end

    def merge(self, shards: Tensor, first: int = 0) -> Iterator[Stack]:
        etp_size = sum(tensor.shape[0] for tensor in self.tensors) // shards.shape[2]
        for names, fused in self._by_rank(shards, etp_size, first):
            parts = fused.view(etp_size, len(names), -1, *fused.shape[3:])
            yield Stack(names, parts.movedim(0, 1).flatten(1, 2))


class ExpertRow(_Experts):
    """Matrices of all experts that are cut by columns: down projections, [experts, hidden, expert ffn hidden]."""

    def local_shape(self, groups: ShardGroups) -> Shape:
        rows, columns = self.tensors[0].shape
        return (len(self._own(groups)), rows, self._share(columns, groups.etp_size, "expert ffn hidden"))

    def pieces(self, groups: ShardGroups) -> Iterator[Piece]:
        [tensor] = self.tensors
        start = 0
        for expert in self._own(groups):
            piece = _columns(tensor.name.format(expert=expert), tensor.shape, groups.etp_rank, groups.etp_size, start)
            yield piece
            start = piece.end

    def merge(self, shards: Tensor, first: int = 0) -> Iterator[Stack]:
        etp_size = self.tensors[0].shape[1] // shards.shape[3]
        for names, weights in self._by_rank(shards, etp_size, first):
            yield Stack(names, weights.permute(1, 2, 0, 3).flatten(2))


class ExpertWhole(_Experts):
    """A matrix of an adapter of all experts, [experts, out, in], which expert-tensor parallelism does not cut."""

    def local_shape(self, groups: ShardGroups) -> Shape:
        return (len(self._own(groups)), *self.tensors[0].shape)

    def pieces(self, groups: ShardGroups) -> Iterator[Piece]:
        [tensor] = self.tensors
        start = 0
        for expert in self._own(groups):
            piece = _rows(tensor.name.format(expert=expert), tensor.shape, 0, tensor.shape[0], start)
            yield piece
            start = piece.end

    def stored_pieces(self, groups: ShardGroups) -> Iterator[Piece]:
        if groups.etp_rank == 0:
            yield from self.pieces(groups)

    def merge(self, shards: Tensor, first: int = 0) -> Iterator[Stack]:
        for names, [own] in self._by_rank(shards, 1, first):
            yield Stack(names, own)

    def n_shards(self, groups: ShardGroups) -> int:
        return groups.ep_size


class ExpertBias(ExpertWhole):
    """Biases of all experts, [experts, hidden], which every rank of expert-tensor parallelism has whole."""

    def merge(self, shards: Tensor, first: int = 0) -> Iterator[Stack]:
        etp_size = len(shards) * shards.shape[1] // (self.tensors[0].n_experts or 1)
        for names, own in self._by_rank(shards, etp_size, first):
            yield Stack(names, own[0])

    def n_shards(self, groups: ShardGroups) -> int:
        return groups.ep_size * groups.etp_size
