"""The metadata of a folder that torch.distributed.checkpoint has written: which tensor lies where in which file.

The file is a pickle. It is read with the few classes that it needs; anything else in it becomes an object
without behaviour, so that no code that comes with a checkpoint is run, and no library that wrote one is needed.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

METADATA_FILE = ".metadata"


@dataclass(frozen=True)
class StoredChunk:
    """A rectangle of a tensor, and where its bytes are."""

    offsets: tuple[int, ...]
    """Index of its first element in the whole tensor."""
    sizes: tuple[int, ...]
    file: str
    """Name of the file, relative to the folder."""
    start: int
    """Place of its first byte in the file."""
    length: int
    """Number of bytes, with the description around the data."""


@dataclass(frozen=True)
class StoredArray:
    """A tensor of the folder."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[StoredChunk, ...]


def read_metadata(folder: Path) -> dict[str, StoredArray]:
    """Return all tensors of a folder by name; what is not a tensor is left out.

    Raises:
        ValueError: the metadata are missing or cannot be read, or the checkpoint is unfinished.
    """
    file = folder / METADATA_FILE
    if file.exists() and not file.is_file():
        raise ValueError(f"{file} is no file, but a folder, a pipe or a device: fetch it again")
    try:
        with file.open("rb") as stream:
            metadata = _MetadataUnpickler(stream).load()
    except FileNotFoundError as error:
        raise ValueError(
            f"{file} is missing: the checkpoint was not finished, or not copied whole (names that begin with a dot are "
            "easily left behind): copy the folder again"
        ) from error
    except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is not the metadata of a checkpoint ({error}): fetch it again") from error
    if not isinstance(metadata, dcp.Metadata) or not isinstance(metadata.storage_data, dict):
        raise ValueError(f"{file} is not the metadata of torch.distributed.checkpoint: fetch it again")
    places = {(index.fqn, _offsets(index.offset)): info for index, info in metadata.storage_data.items()}
    return {
        name: _array(name, stored, places, file)
        for name, stored in metadata.state_dict_metadata.items()
        if isinstance(stored, dcp.TensorStorageMetadata)
    }


def _array(
    name: str, stored: dcp.TensorStorageMetadata, places: Mapping[tuple[str, tuple[int, ...]], _StorageInfo], file: Path
) -> StoredArray:
    shape, chunks = tuple(stored.size), []
    for chunk in stored.chunks:
        offsets = _offsets(chunk.offsets)
        # A tensor that is not sharded may be listed without its offsets.
        place = places.get((name, offsets)) or places.get((name, ()))
        if place is None:
            raise ValueError(f"{file} does not say where {name} lies from {list(offsets)} on: fetch it again")
        chunks.append(StoredChunk(offsets, tuple(chunk.sizes), place.relative_path, place.offset, place.length))
    if (found := sum(prod(chunk.sizes) for chunk in chunks)) != prod(shape):
        raise ValueError(
            f"{name} in {file.parent} has {found:,} elements of {prod(shape):,}: the checkpoint lacks what some ranks "
            "wrote, or holds it twice"
        )
    return StoredArray(shape, stored.properties.dtype, tuple(chunks))


def _offsets(offsets: Any) -> tuple[int, ...]:
    return () if offsets is None else tuple(offsets)


class _Inert:
    """Stands for an object of a class that reading tensors does not need."""

    def __new__(cls, *_args: Any, **_kwargs: Any) -> _Inert:
        return super().__new__(cls)

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, item: Any) -> None:
        """Take an element of a list, as unpickling hands them over."""

    def extend(self, items: Any) -> None:
        """Take elements of a list, as unpickling hands them over."""


class _MetadataUnpickler(pickle.Unpickler):
    _CLASSES = (
        dcp.Metadata,
        dcp.MetadataIndex,
        dcp.TensorStorageMetadata,
        dcp.BytesStorageMetadata,
        dcp.ChunkStorageMetadata,
        dcp.TensorProperties,
        dcp._MEM_FORMAT_ENCODING,
        _StorageInfo,
        torch.Size,
    )
    _NEEDED = {(kind.__module__, kind.__name__): kind for kind in _CLASSES}  # noqa: RUF012 (nothing writes to it)

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__(stream)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._NEEDED:
            return self._NEEDED[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _layout
        return _Inert


def _layout(_name: str) -> torch.layout:
    return torch.strided
