"""Writes tensors, or rectangles of them, to their places in the safetensors files of a plan.

    create: headers and final sizes ──> write: any process, any order ──> sync: on the disk

Data goes from the tensor's device to the file in blocks, so a process needs no memory for whole tensors.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from fivefold.bridge.shard_plan import ShardPlan
from fivefold.observe.durable import naming

BLOCK_BYTES = 32 * 2**20
"""Most bytes that are copied to the host at one time."""
_LARGE = 2**20
"""Bytes from which one write goes to the disk on its own."""


class ShardFiles:
    """The files of a plan in a folder, for this process to write to.

    Several processes may write at the same time, to different places. All writes are system calls on files that are
    open for writing only: through mapped or read pages, two nodes of a network file system would overwrite each other's
    bytes where their places share a page.
    """

    def __init__(self, folder: Path, plan: ShardPlan) -> None:
        self._folder = folder
        self._plan = plan
        self._open: dict[str, int] = {}
        self._pinned: Tensor | None = None

    def create(self) -> None:
        """Create all files with their headers and in their final sizes. One process does this before any writes.

        Raises:
            OSError: a file exists, or the file system refuses it.
        """
        for file in self._plan.files:
            path = self._folder / file.name
            with naming(path):
                self._open[file.name] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
                os.ftruncate(self._open[file.name], file.size)
            self._write_at(file.name, file.header, 0)

    def write(self, name: str, data: Tensor, row: int = 0, column: int = 0) -> int:
        """Write `data` into the tensor `name` and return the number of bytes.

        Args:
            name: a tensor of the plan.
            data: the tensor, or a rectangle of its rows and, if it has two dimensions, columns; on any device.
            row: index of the rectangle's first row in the tensor.
            column: index of its first column.

        Raises:
            ValueError: another dtype than planned, or a rectangle that leaves the tensor.
            OSError: the file system refuses it.
        """
        place = self._plan.place(name)
        if place.turned_at is not None:
            data, row, column = data.t(), column, place.turned_at + row
        _check(name, data, row, column, place.spec.dtype, place.spec.shape)
        itemsize, width = data.element_size(), prod(place.spec.shape[1:])
        first = place.begin + (row * width + column) * itemsize
        for offset, run in self._runs(data.detach(), width):
            self._write_at(place.file, run.view(torch.uint8).numpy().data, first + offset * itemsize)
        return data.nbytes

    def _runs(self, data: Tensor, width: int) -> Iterator[tuple[int, Tensor]]:
        """Yield what is contiguous in a tensor with rows of `width` elements, on the host, each [elements].

        With each comes the distance of its first element from the first of `data`, in elements of the whole tensor.
        """
        if data.numel() == 0:
            return
        most = max(1, BLOCK_BYTES // data.element_size())
        rows_RC = data.reshape(len(data) if data.ndim else 1, -1)
        n_columns = rows_RC.shape[1]
        if n_columns == width or len(rows_RC) == 1:
            flat = rows_RC.reshape(-1)
            for start in range(0, flat.numel(), most):
                yield start, self._on_host(flat[start : start + most])
            return
        step = max(1, most // n_columns)
        for start in range(0, len(rows_RC), step):
            for row, run in enumerate(self._on_host(rows_RC[start : start + step]), start=start):
                yield row * width, run

    def _on_host(self, block: Tensor) -> Tensor:
        """Return a block in host memory, contiguous. One of a GPU stays there until the next one comes."""
        if block.device.type != "cuda":
            # A copy, because `numpy()` fixes the size of a storage, and a parameter's storage may be offloaded.
            return block.cpu().clone(memory_format=torch.contiguous_format)
        # A GPU copies into pinned memory about thirty times as fast as into other memory.
        if self._pinned is None or len(self._pinned) < block.nbytes:
            self._pinned = torch.empty(max(BLOCK_BYTES, block.nbytes), dtype=torch.uint8, pin_memory=True)
        return self._pinned[: block.nbytes].view(block.dtype).view(block.shape).copy_(block)

    def sync(self) -> None:
        """Wait until what this process has written is on the disk, and close the files.

        Raises:
            OSError: the disk, or the server of a network file system, has not taken all of it.
        """
        for file, descriptor in self._open.items():
            with naming(self._folder / file):
                os.fsync(descriptor)
        self.close()

    def close(self) -> None:
        """Close the files as they are."""
        while self._open:
            _, descriptor = self._open.popitem()
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write_at(self, file: str, data: bytes | memoryview, offset: int) -> None:
        path = self._folder / file
        with naming(path):
            if file not in self._open:
                self._open[file] = os.open(path, os.O_WRONLY)
            left, place = memoryview(data), offset
            while left:
                written = os.pwrite(self._open[file], left, place)
                left, place = left[written:], place + written
            if sys.platform == "linux" and len(data) >= _LARGE:
                # The disk begins with it at once. Otherwise Linux waits for the fsync, or for memory to run short.
                os.posix_fadvise(self._open[file], offset, len(data), os.POSIX_FADV_DONTNEED)


def _check(name: str, data: Tensor, row: int, column: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if data.dtype != dtype:
        raise ValueError(f"{name} was planned as {dtype} and is {data.dtype}: plan and data must have one dtype")
    sizes, first = tuple(data.shape), (row, column)[: len(shape)]
    # Rows are cut, and columns where a row is one run of them; of dimensions in between, all must be there.
    ends, whole_ends = ((each[0], each[-1]) if len(each) > 1 else each for each in (sizes, shape))
    fits = len(sizes) == len(shape) and sizes[1:-1] == shape[1:-1]
    fits = fits and all(begin + size <= whole for begin, size, whole in zip(first, ends, whole_ends, strict=True))
    if not fits or (prod(shape[1:-1]) > 1 and sizes[1:] != shape[1:]):
        raise ValueError(
            f"{name} has the shape {list(shape)}, and data of shape {list(sizes)} at {list(first)} is no part of it"
        )
