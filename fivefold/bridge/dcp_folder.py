"""Reads tensors of a folder that torch.distributed.checkpoint has written, in one process, and only what is asked for.

tensor [layers, rows, columns] = chunks, one or more from each rank that wrote
read(name, index) ──> the parts of those chunks that the index touches ──> one tensor
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import BinaryIO, Self

import torch
from torch import Tensor

from fivefold.bridge.dcp_metadata import StoredArray, StoredChunk, read_metadata
from fivefold.bridge.saved_tensor import DamagedTensorError, read_part


class DCPFolder:
    """The tensors of a folder of torch.distributed.checkpoint.

    The metadata are read at once, and the sizes of all files compared with them. Data is read from files that are
    opened at their first use; as a context manager it closes them on exit.

    Raises:
        ValueError: metadata or files are missing, or they are damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._arrays = {name: _IndexedArray(array) for name, array in read_metadata(folder).items()}
        self._opened: dict[str, BinaryIO] = {}
        self._check_files()

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._arrays)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._arrays[name].stored.shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return self._arrays[name].stored.dtype

    def file(self, name: str, *lead: int) -> str:
        """Return the name of the file that holds a tensor; the first one where there are several.

        Args:
            name: the tensor.
            lead: index into its first dimensions; none for the beginning.
        """
        index = [slice(first, first + 1) for first in lead]
        index += [slice(0, 1)] * (len(self.shape(name)) - len(index))
        return next(self._arrays[name].touched(index)).file

    def read(self, name: str, *index: slice) -> Tensor:
        """Return a part of the tensor `name` on the CPU.

        Args:
            name: the tensor.
            index: a slice for each dimension, with first and last index and without a step.

        Raises:
            ValueError: the file does not hold what the metadata say.
        """
        array = self._arrays[name]
        touched = list(array.touched(index))
        if len(touched) == 1:
            return self._read_chunk(name, touched[0], index)
        whole = torch.empty([part.stop - part.start for part in index], dtype=array.stored.dtype)
        for chunk in touched:
            common = [_overlap(*pair) for pair in zip(index, chunk.offsets, chunk.sizes, strict=True)]
            place = tuple(
                slice(part.start - asked.start, part.stop - asked.start)
                for part, asked in zip(common, index, strict=True)
            )
            whole[place] = self._read_chunk(name, chunk, common)
        return whole

    def for_another_thread(self) -> DCPFolder:
        """Return a reader of the same folder that shares the metadata and opens its own files."""
        other = copy(self)
        other._opened = {}
        return other

    def close(self) -> None:
        """Close the files; a later read opens them again."""
        for file in self._opened.values():
            file.close()
        self._opened.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_chunk(self, name: str, chunk: StoredChunk, index: Sequence[slice]) -> Tensor:
        part = [
            slice(asked.start - offset, asked.stop - offset) for asked, offset in zip(index, chunk.offsets, strict=True)
        ]
        if chunk.file not in self._opened:
            self._opened[chunk.file] = (self.folder / chunk.file).open("rb")
        try:
            return read_part(self._opened[chunk.file], chunk.start, chunk.length, part)
        except DamagedTensorError as error:
            raise ValueError(
                f"{self.folder / chunk.file} is damaged at byte {chunk.start:,}, where {name} should be: {error}; "
                "fetch the file again"
            ) from error

    def _check_files(self) -> None:
        ends: dict[str, int] = {}
        for array in self._arrays.values():
            for chunk in array.stored.chunks:
                ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.start + chunk.length)
        problems = []
        for name, end in sorted(ends.items()):
            file = self.folder / name
            if not file.is_file():
                problems.append(f"{name} is missing")
            elif (size := file.stat().st_size) < end:
                problems.append(f"{name} is truncated: it has {size:,} bytes, and at least {end:,} are described")
        if problems:
            title = f"the checkpoint in {self.folder} is not whole: copy it again"
            raise ValueError("\n".join([title, *map("  {}".format, problems)]))


class _IndexedArray:
    """A stored tensor, whose chunks are found by their leading indices.

    A tensor that stacks layers and experts has tens of thousands of chunks, which a linear search would look through
    for each of as many reads.
    """

    def __init__(self, stored: StoredArray) -> None:
        self.stored = stored

    def touched(self, index: Sequence[slice]) -> Iterator[StoredChunk]:
        """Yield the chunks that the part of the tensor at `index` lies in."""
        for lead in product(*(range(part.start, part.stop) for part in index[: self._n_lead])):
            for chunk in self._by_lead.get(lead, ()):
                pairs = zip(index, chunk.offsets, chunk.sizes, strict=True)
                if all(part.start < offset + size and offset < part.stop for part, offset, size in pairs):
                    yield chunk

    @cached_property
    def _n_lead(self) -> int:
        """Number of leading dimensions in which every chunk has size 1."""
        sizes = [max(chunk.sizes[axis] for chunk in self.stored.chunks) for axis in range(len(self.stored.shape))]
        return next((axis for axis, size in enumerate(sizes) if size > 1), len(sizes))

    @cached_property
    def _by_lead(self) -> Mapping[tuple[int, ...], list[StoredChunk]]:
        found: dict[tuple[int, ...], list[StoredChunk]] = {}
        for chunk in self.stored.chunks:
            found.setdefault(chunk.offsets[: self._n_lead], []).append(chunk)
        return found


def _overlap(asked: slice, offset: int, size: int) -> slice:
    return slice(max(asked.start, offset), min(asked.stop, offset + size))
