"""Files of torch.distributed.checkpoint (DCP) that ranks write without a process group, with digests.

    rank      items ──write_files──> __<rank>_<n>.distcp, on the disk ──> WrittenPart  ─┐
    driver    finish: checks that the parts of all ranks tile every tensor, writes .metadata <┘

torch's own `save` and `async_save` (tried with 2.13) write the same format. They do not replace this, because they

- coordinate ranks by collectives of the thread or process that writes: when one rank dies, the others get a connection
  error of gloo that names neither rank nor reason, and a failed write cannot be repeated by one rank alone;
- compute no digests, and sync files but not the folder, so `.metadata` may outlive the files that it lists;
- stage the state as it is, so master weights in 16 + 16 bits must be joined earlier, all at one time, or by a planner
  as long as this file;
- always copy the whole state, while here it may be written in chunks where host memory has no room for a copy.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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

METADATA = ".metadata"
"""Name of DCP's index file."""
_THREADS = 4
"""Most files that a rank writes at one time."""
_FILE_BYTES = 256 * 2**20
"""Bytes from which on a rank writes more than one file."""
Item = tuple[WriteItem, Tensor]
"""A tensor on the CPU that owns its storage, and what DCP calls it."""


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


def piece_item(kind: str, piece: Piece, memory: npt.NDArray[np.float32], begin: int) -> Item:
    """Return a piece of the range that begins at element `begin` of the shard, and is in `memory`."""
    # A tensor that owns its storage: torch.save writes the whole storage of a view.
    elements = torch.frombuffer(memory, dtype=torch.float32, count=piece.n_elements, offset=4 * (piece.start - begin))
    item = _item(f"{kind}/{piece.name}", piece.offsets, piece.sizes, piece.shape, torch.float32)
    return item, elements.view(piece.sizes)


def whole_items(tensors: Mapping[str, Tensor]) -> list[Item]:
    """Return tensors by key that one rank stores whole."""
    return [
        (_item(key, (0,) * tensor.ndim, tuple(tensor.shape), tuple(tensor.shape), tensor.dtype), tensor)
        for key, tensor in tensors.items()
    ]


def n_files(n_bytes: int) -> int:
    """Return the number of files for so many bytes of a rank, which are written at the same time."""
    return min(_THREADS, 1 + n_bytes // _FILE_BYTES)


def shares(items: Sequence[Item], count: int) -> list[list[Item]]:
    """Split items into at most `count` runs of about the same number of bytes."""
    total = max(1, sum(tensor.nbytes for _, tensor in items))
    shares: list[list[Item]] = [[] for _ in range(count)]
    done = 0
    for item in items:
        shares[min(count - 1, done * count // total)].append(item)
        done += item[1].nbytes
    return [share for share in shares if share]


def write_files(folder: Path, rank: int, shares: Sequence[Iterable[Item]]) -> WrittenPart:
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
        items: what to write. Shared items end if the file cannot be written, so that no thread continues for nothing.

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
        if isinstance(items, SharedItems):
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


class SharedItems:
    """Items that several threads take, each made when it is taken; none after one thread has failed."""

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
