"""Snapshots of one rank's training state, and its files, whatever engine it belongs to.

    device ──snapshot──> host memory ──write, in any thread──> files
    device or host ──write, chunk by chunk, while training waits──> the same files

Tensors are float32, and have keys such as `param/model.norm.weight`: a kind and a Hugging Face name. Each rank writes
its own pieces. `stored_state` reads them on any layout, as does torch.distributed.checkpoint.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from fivefold.bridge.pieces import Piece
from fivefold.engine.state.dcp_files import (
    Item,
    SharedItems,
    WrittenPart,
    n_files,
    piece_item,
    shares,
    whole_items,
    write_files,
)
from fivefold.observe.progress import Count, counting
from fivefold.weights.pinned import host_zeros

CHUNK_ELEMENTS = 2**24
"""Most elements of a chunk in host memory, one for each thread, while state is written without a copy."""


@dataclass(frozen=True)
class StoredRange:
    """A flat range of a shard, with the pieces of it that this rank stores."""

    kind: str
    """Such as `param` or `exp_avg`: the first part of the keys."""
    begin: int
    """First element of the range in the flattened shard."""
    n_elements: int
    pieces: tuple[Piece, ...]
    """Pieces within the range; what they leave out is not stored."""


@dataclass(frozen=True)
class WrittenSnapshot:
    """One rank's state at one moment, which is on the disk."""

    part: WrittenPart

    def write(self) -> WrittenPart:
        """Return what was written."""
        return self.part


class StateWriter:
    """Takes snapshots of one rank's state; what is stored where is worked out once.

    Args:
        rank: number of this rank, which its files are named by.
        ranges: what the rank stores.
    """

    def __init__(self, rank: int, ranges: Sequence[StoredRange]) -> None:
        self._rank = rank
        self._ranges = tuple(ranges)
        self._hosts: list[Tensor] = []
        self._items: list[Item] = []
        self._latest: weakref.ref[HostSnapshot] | None = None

    def snapshot(self, folder: Path, tensors: Iterable[Tensor], small: Mapping[str, Tensor]) -> HostSnapshot:
        """Copy the state to host memory, which is reused from one snapshot to the next.

        Args:
            folder: the folder to which the snapshot will be written.
            tensors: float32 [n_elements] of each range, on any device. They may change when this returns.
            small: other tensors by key, on the CPU, which this rank stores whole; they must not change later.

        Raises:
            ValueError: the last snapshot still exists and is not written yet.
        """
        latest = self._latest() if self._latest is not None else None
        if latest is not None and not latest.is_written:
            raise ValueError(
                f"the snapshot for {latest.folder} is not written yet, and the next one would overwrite it in host "
                "memory: write it first"
            )
        for number, (stored, tensor) in enumerate(zip(self._ranges, tensors, strict=True)):
            if number == 0 and not self._hosts:
                self._allocate(pinned=tensor.is_cuda)
            self._hosts[number].copy_(tensor.view(stored.n_elements), non_blocking=True)
        # Without a range nothing was copied, and the driver, which has none, must not open a CUDA context.
        if self._ranges and torch.cuda.is_available():
            torch.cuda.synchronize()
        snapshot = HostSnapshot(folder, self._rank, [*whole_items(small), *self._items])
        self._latest = weakref.ref(snapshot)
        return snapshot

    def write(self, folder: Path, tensors: Iterable[Tensor], small: Mapping[str, Tensor]) -> WrittenSnapshot:
        """Write the state as it is, in chunks through host memory, and wait until it is on the disk.

        Args:
            folder: the folder that gets this rank's files.
            tensors: float32 [n_elements] of each range, on any device; they must not change before this returns. The
                next one is asked for, in any thread, when the one before it is written.
            small: other tensors by key, on the CPU, which this rank stores whole.

        Raises:
            OSError: a file cannot be written; the error names it.
        """
        n_bytes = 4 * sum(piece.n_elements for stored in self._ranges for piece in stored.pieces)
        n_bytes += sum(tensor.nbytes for tensor in small.values())
        with counting("writing the checkpoint", n_bytes) as count:
            items = SharedItems(_counted(chain(whole_items(small), self._chunks(tensors)), count))
            part = write_files(folder, self._rank, [items] * n_files(n_bytes))
        return WrittenSnapshot(part)

    def _chunks(self, tensors: Iterable[Tensor]) -> Iterator[Item]:
        """Yield the pieces of every range, cut where chunks end."""
        for stored, tensor in zip(self._ranges, tensors, strict=True):
            flat = tensor.detach().view(stored.n_elements)
            for first in range(0, stored.n_elements, CHUNK_ELEMENTS):
                begin = stored.begin + first
                # A copy on the CPU too: `numpy` makes a storage that can never be resized, as offloading would.
                memory = flat[first : first + CHUNK_ELEMENTS].to("cpu", copy=True).numpy()
                for piece in stored.pieces:
                    for part in piece.within(begin, begin + len(memory)):
                        yield piece_item(stored.kind, part, memory, begin)

    def _allocate(self, *, pinned: bool) -> None:
        sizes = [stored.n_elements for stored in self._ranges]
        self._hosts = list(host_zeros(sum(sizes), torch.float32, pinned=pinned).split(sizes))
        for stored, host in zip(self._ranges, self._hosts, strict=True):
            memory = host.numpy()
            self._items += [piece_item(stored.kind, piece, memory, stored.begin) for piece in stored.pieces]


class HostSnapshot:
    """One rank's state at one moment, in host memory."""

    def __init__(self, folder: Path, rank: int, items: Sequence[Item]) -> None:
        self.folder = folder
        self.n_bytes = sum(tensor.nbytes for _, tensor in items)
        """Bytes of this rank."""
        self.is_written = False
        self._rank = rank
        self._items = items

    def write(self) -> WrittenPart:
        """Write this rank's files below `folder`, and wait until they are on the disk.

        It may run in any thread, while the rank does anything else, and may be called again after an error.

        Raises:
            OSError: a file cannot be written; the error names it.
        """
        part = write_files(self.folder, self._rank, shares(self._items, n_files(self.n_bytes)))
        self.is_written = True
        return part


def _counted(items: Iterable[Item], count: Count) -> Iterator[Item]:
    """Yield items, and count the bytes of each when the next one is asked for."""
    for item in items:
        yield item
        count(item[1].nbytes)
