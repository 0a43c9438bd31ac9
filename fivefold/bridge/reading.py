"""Reads whole Hugging Face tensors into the shards of a rank, from whatever holds them: files, a generator, memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from torch import Tensor

from fivefold.bridge.groups import ShardGroups
from fivefold.bridge.mapping import WeightMapping
from fivefold.bridge.pieces import Piece


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


class WithFurther(ABC):
    """The tensors of a source, and further ones that it lacks (`TensorReader`)."""

    def __init__(self, source: TensorReader, further: Mapping[str, tuple[int, ...]]) -> None:
        """Take the source, and the shapes of the further tensors by name."""
        self._source, self._further = source, further

    @property
    def folder(self) -> Path:
        """The model's folder."""
        return self._source.folder

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return self._source.names | self._further.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._further[name] if name in self._further else self._source.shape(name)

    def file(self, name: str) -> str:
        """Return the name of the file that holds a tensor, or what holds a further one."""
        return self._origin(name) if name in self._further else self._source.file(name)

    def read(self, name: str, *index: slice) -> Tensor:
        """Return the tensor `name`, or the part of it that `index` selects along its first dimensions."""
        return self._read(name, index or (slice(None),)) if name in self._further else self._source.read(name, *index)

    @abstractmethod
    def _origin(self, name: str) -> str:
        """Return what errors say in place of the file of a further tensor."""

    @abstractmethod
    def _read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """Return the part of a further tensor that `index` selects."""


def fill(parameter: Tensor, mapping: WeightMapping, reader: TensorReader, groups: ShardGroups) -> None:
    """Copy this rank's pieces into `parameter` ([local_shape]), converting to its dtype; padding becomes zero."""
    by_name: dict[str, list[Piece]] = {}
    covered = 0
    for piece in mapping.pieces(groups):
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


def fill_range(values_N: Tensor, begin: int, mapping: WeightMapping, reader: TensorReader, groups: ShardGroups) -> None:
    """Copy the elements of this rank's flattened shard from `begin` on into `values_N`; padding becomes zero."""
    values_N.zero_()
    for piece in mapping.pieces(groups):
        for cut in piece.within(begin, begin + values_N.numel()):
            cut.view(values_N, begin).copy_(reader.read(cut.name, *cut.index))
