"""Training state on disk in the format of torch.distributed.checkpoint (DCP), whatever engine it belongs to.

    rank      device ──snapshot──> host memory ──write, in any thread──> __<rank>_<n>.distcp  ─┐ WrittenPart
              device or host ──write, chunk by chunk, while training waits──> the same files  ─┤
    driver    finish: checks that the parts of all ranks tile every tensor, writes .metadata  <┘

Tensors are float32, and have keys such as `param/model.norm.weight`: a kind and a Hugging Face name. Each rank writes
its own pieces. `stored_state` reads them on any layout, as does torch.distributed.checkpoint.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from typing import IO, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from xxhash import xxh3_128

from fivefold.bridge.pieces import Piece
from fivefold.observe.durable import naming, sync_folder
from fivefold.observe.progress import Count, counting

METADATA = ".metadata"
"""Name of DCP's index file."""
_THREADS = 4
"""Most files that a rank writes at one time."""
_FILE_BYTES = 256 * 2**20
"""Bytes from which on a rank writes more than one file."""
CHUNK_ELEMENTS = 2**24
"""Most elements of a chunk in host memory, of which each thread has one, while state is written without a copy."""

Item = tuple[WriteItem, Tensor]
"""A tensor on the CPU, with storage of its own size, and what DCP calls it."""


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
class WrittenFile:
    """A file that is on the disk."""

    name: str
    """Path relative to the folder of the state."""
    n_bytes: int
    xxh3_128: str
    """Digest of the content, in hexadecimal."""


@dataclass(frozen=True)
class WrittenPart:
    """What one rank wrote."""

    files: tuple[WrittenFile, ...]
    items: tuple[WriteItem, ...]
    results: tuple[WriteResult, ...]


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
        self._memory = torch.empty(0)
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
        snapshot = HostSnapshot(folder, self._rank, [*_whole_items(small), *self._items])
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
            items = _SharedItems(_counted(chain(_whole_items(small), self._chunks(tensors)), count))
            part = _write_files(folder, self._rank, [items] * _n_files(n_bytes))
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
                        yield _piece_item(stored.kind, part, memory, begin)

    def _allocate(self, *, pinned: bool) -> None:
        self._memory = torch.empty(sum(stored.n_elements for stored in self._ranges), dtype=torch.float32)
        if pinned:
            _pin(self._memory, self)
        self._hosts = list(self._memory.split([stored.n_elements for stored in self._ranges]))
        for stored, host in zip(self._ranges, self._hosts, strict=True):
            memory = host.numpy()
            self._items += [_piece_item(stored.kind, piece, memory, stored.begin) for piece in stored.pieces]


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

        It may run in any thread, beside anything that the rank does, and may be called again after an error.

        Raises:
            OSError: a file cannot be written; the error names it.
        """
        part = _write_files(self.folder, self._rank, _shares(self._items, _n_files(self.n_bytes)))
        self.is_written = True
        return part


class _SharedItems:
    """Items that several threads take, each of which is made when it is taken; none after one of them has failed."""

    def __init__(self, items: Iterable[Item]) -> None:
        self._items = iter(items)
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        with self._lock:
            return next(self._items)

    def end(self) -> None:
        with self._lock:
            self._items = iter(())


def _counted(items: Iterable[Item], count: Count) -> Iterator[Item]:
    """Yield items, and count the bytes of each when the next one is asked for."""
    for item in items:
        yield item
        count(item[1].nbytes)


def finish(folder: Path, parts: Sequence[WrittenPart]) -> list[WrittenFile]:
    """Write the index file of what all ranks wrote, in one process. Returns all files, the index file too.

    Raises:
        ValueError: the parts do not tile every tensor exactly once: a rank's part is missing, or there twice.
        OSError: the file cannot be written; the error names it.
    """
    described = _describe_tensors([item for part in parts for item in part.items])
    # torch's tools, such as `dcp_to_torch_save`, look up here where in nested dictionaries a key belongs.
    metadata = Metadata({**described}, planner_data={key: (key,) for key in described})
    with naming(folder / METADATA):
        FileSystemWriter(folder).finish(metadata, [list(part.results) for part in parts])
        sync_folder(folder)
        content = (folder / METADATA).read_bytes()
    index = WrittenFile(METADATA, len(content), xxh3_128(content).hexdigest())
    return [*(file for part in parts for file in part.files), index]


def _describe_tensors(items: Sequence[WriteItem]) -> dict[str, TensorStorageMetadata]:
    """Return DCP's description of every key."""
    described: dict[str, TensorStorageMetadata] = {}
    for item in items:
        data = item.tensor_data
        assert data is not None  # all items are tensors
        tensor = described.setdefault(item.index.fqn, TensorStorageMetadata(data.properties, data.size, []))
        tensor.chunks.append(data.chunk)
    wrong = [key for key, tensor in described.items() if not _is_tiled(tensor)]
    if wrong:
        raise ValueError(
            f"what the ranks wrote does not tile {len(wrong)} tensors exactly once, such as {', '.join(wrong[:3])}: "
            "pass the parts of all ranks, each once"
        )
    return described


def _is_tiled(tensor: TensorStorageMetadata) -> bool:
    """Return whether the chunks hold every element once.

    The pieces of one layout either tile a tensor, or some are missing or there twice, so that counting is enough.
    """
    n_elements = sum(prod(chunk.sizes) for chunk in tensor.chunks)
    return n_elements == prod(tensor.size) and len({chunk.offsets for chunk in tensor.chunks}) == len(tensor.chunks)


def _item(
    key: str, offsets: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> WriteItem:
    """Return DCP's description of a rectangle of the tensor `key`."""
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=dtype), torch.Size(shape))
    return WriteItem(MetadataIndex(key, offsets), WriteItemType.SHARD, tensor_data=data)


def _piece_item(kind: str, piece: Piece, memory: npt.NDArray[np.float32], begin: int) -> Item:
    """Return a piece of the range that begins at element `begin` of the shard, and is in `memory`."""
    # A tensor with storage of its own: torch.save writes the whole storage of a view.
    elements = torch.frombuffer(memory, dtype=torch.float32, count=piece.n_elements, offset=4 * (piece.start - begin))
    item = _item(f"{kind}/{piece.name}", piece.offsets, piece.sizes, piece.shape, torch.float32)
    return item, elements.view(piece.sizes)


def _whole_items(tensors: Mapping[str, Tensor]) -> list[Item]:
    """Return tensors by key that one rank stores whole."""
    return [
        (_item(key, (0,) * tensor.ndim, tuple(tensor.shape), tuple(tensor.shape), tensor.dtype), tensor)
        for key, tensor in tensors.items()
    ]


def _n_files(n_bytes: int) -> int:
    """Return the number of files for so many bytes of a rank, which are written at the same time."""
    return min(_THREADS, 1 + n_bytes // _FILE_BYTES)


def _shares(items: Sequence[Item], count: int) -> list[list[Item]]:
    """Split items into at most `count` runs of about the same number of bytes."""
    total = max(1, sum(tensor.nbytes for _, tensor in items))
    shares: list[list[Item]] = [[] for _ in range(count)]
    done = 0
    for item in items:
        shares[min(count - 1, done * count // total)].append(item)
        done += item[1].nbytes
    return [share for share in shares if share]


def _write_files(folder: Path, rank: int, shares: Sequence[Iterable[Item]]) -> WrittenPart:
    """Write a rank's files, one for each share, at the same time, and wait until they are on the disk.

    Raises:
        OSError: a file cannot be written; the error names it.
    """
    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for partial in folder.glob(f"__{rank}_*.distcp"):
        partial.unlink()
    paths = [folder / f"__{rank}_{number}.distcp" for number in range(len(shares))]
    with ThreadPoolExecutor(_THREADS, "state-writer") as pool:
        parts = list(pool.map(_write_items, paths, shares))
    sync_folder(folder)
    return WrittenPart(
        files=tuple(file for part in parts for file in part.files),
        items=tuple(item for part in parts for item in part.items),
        results=tuple(result for part in parts for result in part.results),
    )


def _write_items(path: Path, items: Iterable[Item]) -> WrittenPart:
    """Write a file of DCP, and wait until it is on the disk.

    Args:
        path: the file; it must not exist.
        items: what to write. Shared items end if the file cannot be written, so that no thread goes on for nothing.

    Raises:
        OSError: it cannot be written; the error names `path`, and a part of the file may be left.
    """
    described, results = [], []
    try:
        with naming(path), path.open("xb") as file:
            stream = _HashedStream(file)
            for item, tensor in items:
                start = stream.n_bytes
                stream.save(tensor)
                length = stream.n_bytes - start
                described.append(item)
                results.append(WriteResult(item.index, length, _StorageInfo(path.name, start, length)))
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        if isinstance(items, _SharedItems):
            items.end()
        raise
    file_on_disk = WrittenFile(path.name, stream.n_bytes, stream.digest)
    return WrittenPart((file_on_disk,), tuple(described), tuple(results))


class _HashedStream:
    """Counts and hashes the bytes on their way to a file, and keeps the error that torch.save replaces by its own."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hasher = xxh3_128()
        self._error: OSError | None = None
        self.n_bytes = 0

    @property
    def digest(self) -> str:
        return self._hasher.hexdigest()

    def save(self, tensor: Tensor) -> None:
        try:
            torch.save(tensor, cast(IO[bytes], self))
        except RuntimeError:  # torch says "unexpected pos" after a failed write
            if self._error is None:
                raise
            raise self._error from None

    def write(self, data: bytes | memoryview) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            self._error = error
            raise
        self._hasher.update(data)
        self.n_bytes += len(data)
        return len(data)

    def flush(self) -> None:
        self._file.flush()


def _pin(memory: Tensor, owner: object) -> None:
    """Page-lock `memory` for as long as `owner` lives, so that copies from the device run at the link's speed.

    torch's own allocator of pinned memory would round the size up to a power of two.
    """
    runtime = torch.cuda.cudart()
    error = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if error:
        raise RuntimeError(
            f"{memory.nbytes:,} bytes of host memory for snapshots cannot be page-locked, CUDA says "
            f"{runtime.cudaGetErrorString(runtime.cudaError(error))}: raise the limit of locked memory (ulimit -l), or "
            "spread the state over more ranks"
        )
    # At the end of the process, CUDA releases the memory by itself.
    weakref.finalize(owner, runtime.cudaHostUnregister, memory.data_ptr()).atexit = False
