"""Reads a part of a tensor that `torch.save` has written somewhere within a file, without reading the rest of it.

`torch.save` writes an uncompressed zip archive: `data.pkl` says dtype, shape and strides, `data/0` holds the bytes.

    file ──[start, start + length)──> archive ──data/0──> bytes of the tensor ──index──> bytes of the part
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO

import torch
from torch import Tensor

_LOCAL_HEADER = struct.Struct("<26x2H")
"""What comes before the bytes of an archive's member: its last two numbers are the lengths of name and extra field."""

_STORAGE_DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
"""Dtypes by the class of torch that an archive names for the bytes."""


class DamagedTensorError(ValueError):
    """The bytes are not a tensor that `torch.save` has written; the message says what is wrong."""


@dataclass(frozen=True)
class _Layout:
    """Dtype, shape and place of a tensor, as its archive describes it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    is_contiguous: bool
    start: int
    """Place of the first byte in the file."""


def read_part(file: BinaryIO, start: int, length: int, index: Sequence[slice]) -> Tensor:
    """Return a part of the tensor that lies in bytes [start, start + length) of `file`.

    Of a contiguous tensor, only the rows (of its first dimension that is not 1) that `index` selects are read.

    Args:
        file: the open file.
        start: place of the archive in the file.
        length: size of the archive.
        index: a slice for each dimension, with first and last index and without a step.

    Raises:
        DamagedTensorError: there is no such tensor.
    """
    layout = _describe(file, start, length)
    if not layout.is_contiguous:
        return _load(file, start, length)[tuple(index)]
    # The part of the flattened tensor between the first and the last selected element of the leading dimensions.
    axis = next((axis for axis, size in enumerate(layout.shape) if size > 1), 0)
    width = prod(layout.shape[axis + 1 :])
    rows = index[axis] if layout.shape else slice(0, 1)
    file.seek(layout.start + rows.start * width * layout.dtype.itemsize)
    raw = bytearray((rows.stop - rows.start) * width * layout.dtype.itemsize)
    if file.readinto(raw) != len(raw):  # type: ignore[attr-defined]
        raise DamagedTensorError("the file ends within the tensor")
    shape = (*layout.shape[:axis], rows.stop - rows.start, *layout.shape[axis + 1 :]) if layout.shape else ()
    block = torch.frombuffer(raw, dtype=layout.dtype).view(shape) if raw else torch.empty(shape, dtype=layout.dtype)
    return block[tuple(slice(None) if number <= axis else part for number, part in enumerate(index))]


def _load(file: BinaryIO, start: int, length: int) -> Tensor:
    file.seek(start)
    tensor: Tensor = torch.load(io.BytesIO(file.read(length)), map_location="cpu", weights_only=True)
    return tensor


def _describe(file: BinaryIO, start: int, length: int) -> _Layout:
    try:
        with zipfile.ZipFile(_Window(file, start, length)) as archive:
            description = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            rebuilt = _TensorUnpickler(io.BytesIO(archive.read(description))).load()
            storage = archive.getinfo(description.removesuffix("data.pkl") + f"data/{rebuilt.storage.key}")
    except (zipfile.BadZipFile, pickle.UnpicklingError, StopIteration, KeyError, EOFError) as error:
        raise DamagedTensorError(f"no tensor of torch.save is there ({error})") from error
    file.seek(start + storage.header_offset)
    lengths = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    data = start + storage.header_offset + _LOCAL_HEADER.size + sum(lengths)
    dtype = rebuilt.storage.dtype
    return _Layout(dtype, rebuilt.shape, rebuilt.is_contiguous, data + rebuilt.offset * dtype.itemsize)


class _Window(io.RawIOBase):
    """A range of a file as a file."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._position = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        n_bytes = max(0, min(len(buffer), self._length - self._position))
        self._file.seek(self._start + self._position)
        data = self._file.read(n_bytes)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


@dataclass(frozen=True)
class _Storage:
    dtype: torch.dtype
    key: str
    """Name of the member of the archive that holds the bytes."""


@dataclass(frozen=True)
class _Rebuilt:
    """The arguments with which `torch.load` would rebuild a tensor."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    is_contiguous: bool


def _rebuild(storage: _Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any) -> _Rebuilt:
    shape = tuple(shape)
    contiguous = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
    # The stride of a dimension of size 1 has no meaning.
    same = all(size == 1 or stride == own for size, stride, own in zip(shape, strides, contiguous, strict=True))
    return _Rebuilt(storage, offset, shape, same)


class _TensorUnpickler(pickle.Unpickler):
    """Reads the description of one plain tensor, and makes nothing else of whatever is there."""

    _MAKERS: dict[tuple[str, str], Callable[..., Any]] = {  # noqa: RUF012 (nothing writes to it)
        ("torch._utils", "_rebuild_tensor_v2"): _rebuild,
        ("collections", "OrderedDict"): dict,
        ("torch", "Size"): tuple,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._MAKERS:
            return self._MAKERS[module, name]
        if module == "torch" and name in _STORAGE_DTYPES:
            return _STORAGE_DTYPES[name]
        raise pickle.UnpicklingError(f"it is described by {module}.{name}")

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, *_ = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError(f"its bytes are described by {pid!r}")
        return _Storage(dtype, key)
