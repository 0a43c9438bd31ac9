"""Named tensors as a stream of flat buckets, for transports that carry few large arrays well and many small ones badly.

    tensors   embed [V, H]        q [H, H]   k [H, K]        norm [H]
    buckets   |embed 1|embed 2|   |q     |k     |norm |
    entries    whole buckets       name, dtype, shape, offset in the bucket

A tensor that does not fit into what is left of a bucket opens the next one; one that is larger than a whole bucket is
spread over several. No buffer is ever larger than the limit, whatever the model's largest tensor.
"""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 16
"""Tensors start at multiples of this many bytes, which suits every dtype and vectorised loads."""


@dataclass(frozen=True)
class BucketEntry:
    """A tensor in a bucket, or the part of it that lies there."""

    name: str
    dtype: str
    """Name of the tensor's dtype, as in `torch.<name>`."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offset: int
    """Offset in the bucket, in bytes."""
    n_bytes: int
    """Number of the tensor's bytes in this bucket."""
    tensor_offset: int
    """Number of the tensor's bytes in earlier buckets."""


@dataclass(frozen=True)
class Bucket:
    """Bytes of several tensors, and their entries. Pickle protocol 5 carries `data` out of band, without a copy."""

    entries: tuple[BucketEntry, ...]
    data: np.ndarray
    """uint8 [bytes], in host memory. Read-only if it comes out of an object store."""
    checksum: int | None = None
    """CRC-32 of `data`; None: nobody asked for it."""


def pack(weights: Iterable[tuple[str, Tensor]], max_bytes: int, *, with_checksum: bool = False) -> Iterator[Bucket]:
    """Pack tensors, in order, into buckets of at most `max_bytes`.

    Tensors may be of any dtype, shape (empty ones too), stride and device. A bucket is filled on its first tensor's
    device and copied to the host at once. A tensor's bytes are copied before the next tensor is asked for, so the
    source may reuse its memory.

    Raises:
        ValueError: `max_bytes` is below the alignment of tensors.
    """
    if max_bytes < _ALIGNMENT:
        raise ValueError(f"max_bytes={max_bytes} is below {_ALIGNMENT}, the alignment of tensors in a bucket: raise it")
    bucket = _OpenBucket(max_bytes, with_checksum)
    for name, tensor in weights:
        source = tensor.detach().contiguous().view(-1).view(torch.uint8)
        if not bucket.has_room(source.numel()):
            yield bucket.close()
        sent = bucket.add(name, tensor, source, 0)
        while sent < source.numel():
            yield bucket.close()
            sent += bucket.add(name, tensor, source, sent)
    if not bucket.is_empty:
        yield bucket.close()


def unpack(buckets: Iterable[Bucket], device: torch.device | str = "cpu") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of `pack`, in order, on `device`.

    On the CPU they share the bucket's memory: do not write to them, and copy those that you keep. To another device,
    each bucket is copied as a whole.

    Raises:
        ValueError: a part of a tensor is missing.
        RuntimeError: a bucket's checksum is another than that of its data.
    """
    split = _SplitTensor()
    for bucket in buckets:
        if bucket.checksum is not None and zlib.crc32(bucket.data.data) != bucket.checksum:
            first = bucket.entries[0].name
            raise RuntimeError(
                f"the weights that arrived are not those that were sent, in the bucket from {first!r} on"
            )
        flat = _as_tensor(bucket.data).to(device)
        for entry in bucket.entries:
            piece = flat[entry.offset : entry.offset + entry.n_bytes]
            whole = piece if entry.n_bytes == _size(entry) else split.add(entry, piece)
            if whole is not None:
                yield entry.name, whole.view(_dtype(entry)).view(entry.shape)
    split.check_complete()


class _OpenBucket:
    """The bucket being filled."""

    def __init__(self, max_bytes: int, with_checksum: bool) -> None:
        self._max_bytes = max_bytes
        self._with_checksum = with_checksum
        self._entries: list[BucketEntry] = []
        self._flat = torch.empty(0, dtype=torch.uint8)
        self._end = 0

    @property
    def is_empty(self) -> bool:
        return not self._entries

    @property
    def _next_offset(self) -> int:
        return -(-self._end // _ALIGNMENT) * _ALIGNMENT

    def has_room(self, n_bytes: int) -> bool:
        """Return whether a tensor may begin here: it fits, or the bucket is empty, so that no other has more room."""
        return self.is_empty or self._next_offset + n_bytes <= self._max_bytes

    def add(self, name: str, tensor: Tensor, source: Tensor, sent: int) -> int:
        """Take as many bytes of `source`, from `sent` on, as fit; return their number."""
        if self.is_empty:
            self._flat = torch.empty(self._max_bytes, dtype=torch.uint8, device=source.device)
        offset = self._next_offset
        piece = source[sent : sent + self._max_bytes - offset]
        self._end = offset + piece.numel()
        self._flat[offset : self._end] = piece
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._entries.append(BucketEntry(name, dtype, tuple(tensor.shape), offset, piece.numel(), sent))
        return piece.numel()

    def close(self) -> Bucket:
        """Return the bucket, and begin the next one."""
        data = self._flat[: self._end].cpu().numpy()
        bucket = Bucket(tuple(self._entries), data, zlib.crc32(data.data) if self._with_checksum else None)
        self._entries, self._end = [], 0
        return bucket


class _SplitTensor:
    """Assembles a tensor that is spread over several buckets."""

    def __init__(self) -> None:
        self._name: str | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._received = 0

    def add(self, entry: BucketEntry, piece: Tensor) -> Tensor | None:
        """Add a piece; return the whole tensor's bytes if it was the last one, else None."""
        if entry.tensor_offset == 0:
            self.check_complete()
            self._name, self._received = entry.name, 0
            self._bytes = torch.empty(_size(entry), dtype=torch.uint8, device=piece.device)
        if entry.name != self._name or entry.tensor_offset != self._received:
            raise ValueError(
                f"a bucket continues tensor {entry.name!r} at byte {entry.tensor_offset}, but {self._received} bytes "
                f"of {self._name!r} came before it: buckets must arrive in order, none left out"
            )
        self._bytes[self._received : self._received + entry.n_bytes] = piece
        self._received += entry.n_bytes
        if self._received < len(self._bytes):
            return None
        self._name = None
        return self._bytes

    def check_complete(self) -> None:
        if self._name is not None:
            raise ValueError(
                f"the buckets end {self._received} bytes into tensor {self._name!r} of {len(self._bytes)} bytes: "
                "buckets must arrive in order, none left out"
            )


def _dtype(entry: BucketEntry) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, entry.dtype)
    return dtype


def _size(entry: BucketEntry) -> int:
    return math.prod(entry.shape) * _dtype(entry).itemsize


def _as_tensor(data: np.ndarray) -> Tensor:
    if data.size == 0:  # torch gives an empty array stride 0, which no other dtype can view
        return torch.empty(0, dtype=torch.uint8)
    with warnings.catch_warnings():
        # Arrays out of an object store are read-only, which torch cannot express; nobody writes to these tensors.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(data)
