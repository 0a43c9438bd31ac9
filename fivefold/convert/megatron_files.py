"""Writes the files of a Megatron-Core checkpoint (`torch_dist`) from a stream of chunks, one at a time.

    __0_0.distcp, __0_1.distcp ...   chunks, one behind the other, each as torch.save writes it
    .metadata                        tensors, their chunks, and where each of these is (a pickle of torch's classes)
    metadata.json, common.pt         what Megatron-Core reads first: the format, and what is not a tensor

torch's own writer keeps a tensor of every name until it is done. This one keeps none.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from fivefold.bridge.dcp_metadata import METADATA_FILE
from fivefold.families.torch_dist import COMMON_FILE, FORMAT, FORMAT_FILE

_FORMAT = {
    "sharded_backend": FORMAT,
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_COMMON = {"checkpoint_version": 3.0, "iteration": 0}
"""Megatron-LM reorders the rows of query, key and value of checkpoints that state no version, as its first ones had."""


class CheckpointFiles:
    """The files of a checkpoint that is being written. Leaving its context closes the file that is open.

    Args:
        folder: an empty folder.
        max_file_bytes: a file of this size is followed by another one.
    """

    def __init__(self, folder: Path, max_file_bytes: int = 5_000_000_000) -> None:
        self._folder = folder
        self._max_file_bytes = max_file_bytes
        self._n_files = 0
        self._file: _File | None = None
        self._tensors: dict[str, TensorStorageMetadata] = {}
        self._objects: dict[str, BytesStorageMetadata] = {}
        self._places: dict[MetadataIndex, _StorageInfo] = {}
        self._empty_object: _StorageInfo | None = None

    def add(self, key: str, shape: Sequence[int], offsets: Sequence[int], chunk: Tensor) -> None:
        """Write a chunk of a tensor. The chunks of a tensor have one dtype, and together they tile it.

        Args:
            key: name of the tensor.
            shape: shape of the whole tensor.
            offsets: index of the chunk's first element in it.
            chunk: the chunk, of as many dimensions, contiguous and with its own storage.

        Raises:
            OSError: the disk is full, or the file system refuses to write; the error names the file.
        """
        stored = TensorStorageMetadata(TensorProperties(dtype=chunk.dtype), torch.Size(shape), [])
        stored = self._tensors.setdefault(key, stored)
        index = MetadataIndex(key, torch.Size(offsets), len(stored.chunks))
        stored.chunks.append(ChunkStorageMetadata(torch.Size(offsets), chunk.size()))
        self._places[index] = self._append(chunk)

    def add_empty_object(self, key: str) -> None:
        """Add an object without content; Megatron-Core wants one for each module that might have a state.

        Raises:
            OSError: as for `add`.
        """
        if self._empty_object is None:
            self._empty_object = self._append([None])
        self._objects[key] = BytesStorageMetadata()
        self._places[MetadataIndex(key)] = self._empty_object

    def finish(self) -> None:
        """Write the files that make a checkpoint of the chunks, and wait until all is on the disk.

        Raises:
            OSError: as for `add`.
        """
        self._end_file()
        metadata = Metadata({**self._tensors, **self._objects}, storage_data=self._places, version=CURRENT_DCP_VERSION)
        for name, content in (
            (METADATA_FILE, pickle.dumps(metadata)),
            (COMMON_FILE, _saved(_COMMON)),
            (FORMAT_FILE, json.dumps(_FORMAT).encode()),
        ):
            self._file = _File(self._folder / name)
            self._file.write(content)
            self._end_file()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.abandon()

    def _append(self, content: Any) -> _StorageInfo:
        if self._file is None:
            self._file = _File(self._folder / f"__0_{self._n_files}.distcp")
            self._n_files += 1
        file = self._file
        start = file.n_bytes
        file.save(content)
        if file.n_bytes >= self._max_file_bytes:
            self._end_file()
        return _StorageInfo(file.path.name, start, file.n_bytes - start)

    def _end_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class _File:
    """A file that grows; its errors name it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.n_bytes = 0
        self._stream: BinaryIO = path.open("xb")
        self._error: OSError | None = None

    def save(self, content: Any) -> None:
        try:
            torch.save(content, self)  # type: ignore[arg-type]
        except RuntimeError as error:  # torch replaces the error of a failed write
            raise self._error or error from None

    def write(self, data: Any) -> int:
        try:
            count = self._stream.write(data)
        except OSError as error:
            self._error = OSError(error.errno, error.strerror, str(self.path))
            raise self._error from error
        self.n_bytes += count
        return count

    def flush(self) -> None:
        """Do nothing; torch.save calls it after each content, and `close` waits until all is on the disk."""

    def close(self) -> None:
        try:
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def abandon(self) -> None:
        """Close the file as it is, after an error that is reported already."""
        with contextlib.suppress(OSError):
            self._stream.close()


def _saved(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()
