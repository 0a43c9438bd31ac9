"""Both ends of host memory: named tensors as a stream of flat buckets, few large arrays in place of many small ones.

    tensors   embed [V, H]        q [H, H]   k [H, K]        norm [H]
    buckets   |embed 1|embed 2|   |q     |k     |norm |
    entries    whole buckets       name, dtype, shape, offset in the bucket

A tensor that does not fit into the rest of a bucket starts the next one; one that is larger than a bucket is spread
over several. No buffer is larger than the limit, whatever the model's largest tensor.
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

from fivefold.weights.stream import Sender, Stack, unstacked
from fivefold.weights.transport import Route

_ALIGNMENT = 16
"""Tensors start at multiples of this many bytes, which suits every dtype and vectorised loads."""


@dataclass(frozen=True)
class BucketEntry:
    """A tensor in a bucket, or a part of it."""

    name: str
    dtype: str
    """Name of the tensor's dtype, as in `torch.<name>`."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offset: int
    """Offset in the bucket, in bytes."""
    n_bytes: int
    """The tensor's bytes in this bucket."""
    tensor_offset: int
    """The tensor's bytes in earlier buckets."""


@dataclass(frozen=True)
class Bucket:
    """Bytes of several tensors, and their entries. Pickle protocol 5 carries `data` out of band, without a copy."""

    entries: tuple[BucketEntry, ...]
    data: np.ndarray
    """uint8 [bytes], in host memory. Read-only if it comes out of an object store."""
    checksum: int | None = None
    """CRC-32 of `data`; None: the run does not check it."""


class HostSender(Sender):
    """Packs the weights on rank 0."""

    def __init__(self, route: Route, rank: int, max_bytes: int) -> None:
        """Take this process's rank in the trainer, and the bytes of a bucket."""
        self._reads, self._checksum, self._max_bytes = rank in route.readers, route.checksum, max_bytes

    def items(self, weights: Iterable[Stack]) -> Iterator[Bucket]:
        """Yield all weights in buckets on rank 0; the other ranks gather with it."""
        if self._reads:
            yield from pack(unstacked(weights), self._max_bytes, with_checksum=self._checksum)
        else:
            for _ in weights:
                yield from ()

    def free(self) -> None:
        """Keep nothing: the buckets are in the object store."""


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
    flat, end, entries = torch.empty(0, dtype=torch.uint8), 0, list[BucketEntry]()
    for name, tensor in weights:
        source = tensor.detach().contiguous().view(-1).view(torch.uint8)
        dtype, packed = str(tensor.dtype).removeprefix("torch."), 0
        while True:
            offset = -(-end // _ALIGNMENT) * _ALIGNMENT
            if entries and offset + source.numel() - packed > max_bytes:
                yield _closed(flat[:end], entries, with_checksum)
                offset, entries = 0, []
            if not entries:
                flat = torch.empty(max_bytes, dtype=torch.uint8, device=source.device)
            piece = source[packed : packed + max_bytes - offset]
            end = offset + piece.numel()
            flat[offset:end] = piece
            entries.append(BucketEntry(name, dtype, tuple(tensor.shape), offset, piece.numel(), packed))
            packed += piece.numel()
            if packed == source.numel():
                break
    if entries:
        yield _closed(flat[:end], entries, with_checksum)


def _closed(flat: Tensor, entries: list[BucketEntry], with_checksum: bool) -> Bucket:
    data = flat.cpu().numpy()
    return Bucket(tuple(entries), data, zlib.crc32(data.data) if with_checksum else None)


def unpack(buckets: Iterable[Bucket], device: torch.device | str = "cpu") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of `pack`, in order, on `device`.

    On the CPU they share the bucket's memory: do not write to them, and copy those that you keep. To another device,
    each bucket is copied as a whole.

    Raises:
        ValueError: a part of a tensor is missing.
        RuntimeError: a bucket's checksum does not match its data.
    """
    name, whole, received = "", torch.empty(0, dtype=torch.uint8), 0
    for bucket in buckets:
        if bucket.checksum is not None and zlib.crc32(bucket.data.data) != bucket.checksum:
            first = bucket.entries[0].name
            raise RuntimeError(
                f"the weights that arrived are not those that were sent, in the bucket from {first!r} on"
            )
        flat = _as_tensor(bucket.data).to(device)
        for entry in bucket.entries:
            dtype: torch.dtype = getattr(torch, entry.dtype)
            size = math.prod(entry.shape) * dtype.itemsize
            tensor = flat[entry.offset : entry.offset + entry.n_bytes]
            if entry.n_bytes < size:
                if entry.tensor_offset == 0:
                    _check_complete(name, whole, received)
                    name, received = entry.name, 0
                    whole = torch.empty(size, dtype=torch.uint8, device=device)
                if (entry.name, entry.tensor_offset) != (name, received):
                    raise ValueError(
                        f"a bucket continues tensor {entry.name!r} at byte {entry.tensor_offset}, but {received} bytes "
                        f"of {name!r} came before it: buckets must arrive in order, none left out"
                    )
                whole[received : received + entry.n_bytes] = tensor
                received += entry.n_bytes
                if received < size:
                    continue
                tensor = whole
            yield entry.name, tensor.view(dtype).view(entry.shape)
    _check_complete(name, whole, received)


def _check_complete(name: str, whole: Tensor, received: int) -> None:
    if received < len(whole):
        raise ValueError(
            f"the buckets end {received} bytes into tensor {name!r} of {len(whole)} bytes: buckets must arrive in "
            "order, none left out"
        )


def _as_tensor(data: np.ndarray) -> Tensor:
    if data.size == 0:  # torch gives an empty array stride 0, which no other dtype can view
        return torch.empty(0, dtype=torch.uint8)
    with warnings.catch_warnings():
        # Arrays out of an object store are read-only, which torch cannot express; nobody writes to these tensors.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(data)
