"""Weights as buckets that stay on the trainer's devices: whole tensors of one dtype, end to end in a flat buffer.

    trainer rank   tensors ──BufferFiller──> buffer 0, buffer 1, buffer 0, ...      the same buckets on every rank
                                               │ handle: how a process on the same device opens the buffer
    driver         DeviceBucket: names, dtypes, shapes, and the handles of all ranks' devices
    engine         opens the handle of its device, or receives the buffer by NCCL

Unlike the buckets of `fivefold.weights.buckets`, these hold whole tensors, because servers load no parts: a tensor that
is larger than a bucket gets a buffer of its size. Tensors that a loader fuses share a bucket. Offsets of routers come
last, in a separate bucket, because they stay float32.
"""

from __future__ import annotations

import base64
import math
import pickle
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fivefold.families.latent_attention import loaded_together
from fivefold.families.sigmoid_experts import is_router_offset
from fivefold.weights.stream import Stack, alone
from fivefold.weights.transport import DEVICE_BYTES

CHECKSUMS = 2**61
"""Checksums are compared modulo this."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Dtype as which elements are added up, by their bytes."""

Handle = tuple[Any, ...]
"""Arguments of `torch.multiprocessing.reductions.rebuild_cuda_tensor`; the device's index is one of them."""


@dataclass(frozen=True)
class DeviceBucket:
    """What a bucket holds, and how to reach it. Its bytes are not here."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    """Name of all tensors' dtype, as in `torch.<name>`."""
    handles: Mapping[str, Handle]
    """The handle of the buffer on each device, by the device's UUID; none where NCCL carries the bytes."""
    checksum: int | None
    """Checksum of all tensors; None: the run does not check it, or this rank does not have them."""

    @staticmethod
    def of(
        tensors: Sequence[tuple[str, Tensor]], handles: Mapping[str, Handle], *, with_checksum: bool
    ) -> DeviceBucket:
        """Return the bucket of tensors of one dtype, which lie end to end in a buffer."""
        return DeviceBucket(
            names=tuple(name for name, _ in tensors),
            shapes=tuple(tuple(tensor.shape) for _, tensor in tensors),
            dtype=str(tensors[0][1].dtype).removeprefix("torch."),
            handles=handles,
            checksum=checksum(tensors) if with_checksum else None,
        )

    @property
    def sizes(self) -> list[int]:
        """Bytes of each tensor; they lie end to end."""
        itemsize = _dtype(self.dtype).itemsize
        return [math.prod(shape) * itemsize for shape in self.shapes]

    @property
    def n_bytes(self) -> int:
        """Bytes of the bucket."""
        return sum(self.sizes)

    def tensors(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that lie in `flat`, uint8 [at least n_bytes], as views of it."""
        dtype = _dtype(self.dtype)
        parts = flat[: self.n_bytes].split(self.sizes)
        for name, shape, part in zip(self.names, self.shapes, parts, strict=True):
            yield name, part.view(dtype).view(shape)

    def outlines(self) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors of the same names and shapes without content."""
        for name, shape in zip(self.names, self.shapes, strict=True):
            yield name, torch.empty(shape, dtype=_dtype(self.dtype), device="meta")

    def pickled_handles(self) -> str:
        """Return the handles by device as base64 of a pickle, as vLLM takes them."""
        return base64.b64encode(pickle.dumps(dict(self.handles))).decode()


def merged(parts: Sequence[DeviceBucket | None]) -> DeviceBucket | None:
    """Merge the ranks' parts of a bucket: a handle, the checksum, or names and shapes alone. None: no more are left."""
    first = parts[0]
    if first is None:
        return None
    handles = {uuid: handle for part in parts if part is not None for uuid, handle in part.handles.items()}
    checksums = (part.checksum for part in parts if part is not None and part.checksum is not None)
    return replace(first, handles=handles, checksum=next(checksums, None))


class BufferFiller:
    """Fills buffers with tensors, in turn, so that one can be read while the next is filled."""

    def __init__(
        self,
        weights: Iterable[Stack],
        *,
        dtype: torch.dtype,
        n_buffers: int,
        max_bytes: int = DEVICE_BYTES,
    ) -> None:
        """Begin with the first tensor.

        Args:
            weights: tensors on one device; each stack is copied before the next is asked for.
            dtype: what they are cast to, apart from the offsets of routers.
            n_buffers: buffers that are filled in turn.
            max_bytes: bytes of a buffer, unless a tensor, or tensors that are loaded together, are larger.
        """
        self._weights = iter(weights)
        self._dtype = dtype
        self._max_bytes = max_bytes
        self._buffers: list[Tensor | None] = [None] * n_buffers
        self._turn = 0
        self._ahead: deque[Stack] = deque()
        """What was read and is in no bucket: what the last bucket held back, then the next stack or its rest."""
        self._offsets: deque[Stack] = deque()
        """Copies of the routers' offsets that were read."""
        self._read()

    def __iter__(self) -> Iterator[tuple[list[tuple[str, Tensor]], Tensor]]:
        """Yield what `fill` returns, up to the last tensors."""
        return iter(self.fill, None)

    def fill(self) -> tuple[list[tuple[str, Tensor]], Tensor] | None:
        """Fill the next buffer with tensors. The one before it stays as it is if there are two.

        Returns:
            The tensors, as views of the buffer, and the buffer (uint8, flat); None if there are no more tensors.
        """
        tensors: list[tuple[str, Tensor]] = []
        if not self._ahead and self._offsets:
            self._ahead, self._offsets, self._dtype = self._offsets, deque(), torch.float32
        while self._ahead and not tensors:
            most = max(self._max_bytes, sum(self._bytes_of_one(stack) for stack in self._ahead))
            buffer = self._buffer(most)
            tensors = self._copied(buffer, most)
            self._hold_back(tensors)
        if not tensors:
            return None
        self._turn = (self._turn + 1) % len(self._buffers)
        return tensors, buffer

    def _copied(self, buffer: Tensor, most: int) -> list[tuple[str, Tensor]]:
        """Copy the next tensors, of at most `most` bytes, into a buffer; return them there."""
        tensors: list[tuple[str, Tensor]] = []
        end = 0
        while self._ahead and end + (n_bytes := self._bytes_of_one(self._ahead[0])) <= most:
            stack = self._ahead.popleft()
            count = min(len(stack.names), (most - end) // n_bytes) if n_bytes else len(stack.names)
            source = stack.tensors[:count]
            target = buffer[end : end + count * n_bytes].view(self._dtype).view(source.shape)
            target.copy_(source)
            tensors += zip(stack.names[:count], target.unbind(), strict=True)
            end += count * n_bytes
            if count < len(stack.names):
                self._ahead.appendleft(Stack(stack.names[count:], stack.tensors[count:]))
            if not self._ahead:
                self._read()
        return tensors

    def _hold_back(self, tensors: list[tuple[str, Tensor]]) -> None:
        """Take tensors out of a bucket that must come with the next one, and what lies between them."""
        group = loaded_together(self._ahead[0].names[0]) if self._ahead else None
        if group is None:
            return
        first = next((index for index, (name, _) in enumerate(tensors) if loaded_together(name) == group), len(tensors))
        # Another bucket has the buffer by the time that they are copied from here.
        self._ahead.extendleft(alone(name, tensor.clone()) for name, tensor in reversed(tensors[first:]))
        del tensors[first:]

    def _read(self) -> None:
        for stack in self._weights:
            if not is_router_offset(stack.names[0]):
                self._ahead.append(Stack(stack.names, stack.tensors.detach()))
                return
            self._offsets.append(Stack(stack.names, stack.tensors.detach().clone()))

    def _bytes_of_one(self, stack: Stack) -> int:
        return stack.tensors.numel() // len(stack.names) * self._dtype.itemsize

    def _buffer(self, n_bytes: int) -> Tensor:
        """Return the buffer whose turn it is, with room for `n_bytes` at least."""
        buffer = self._buffers[self._turn]
        if buffer is None or buffer.numel() < n_bytes:
            self._buffers[self._turn] = buffer = None  # its memory may serve the new one
            buffer = torch.empty(n_bytes, dtype=torch.uint8, device=self._ahead[0].tensors.device)
            self._buffers[self._turn] = buffer
        return buffer


class Checksum:
    """Passes tensors on, and adds up a number that depends on each name and all bits, but not on the order.

    A tensor's elements are summed as integers on its device. The sum finds lost, stale and mixed-up tensors, but not
    two elements of a tensor that change places. The code inside vLLM computes the same number.
    """

    def __init__(self, tensors: Iterable[tuple[str, Tensor]], is_wanted: bool = True) -> None:
        """Count nothing unless `is_wanted`."""
        self._tensors = tensors
        self._is_wanted = is_wanted
        self.total = 0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._tensors:
            if self._is_wanted:
                integers = tensor.reshape(-1).view(_INTEGERS[tensor.dtype.itemsize])
                self.total += (1 + zlib.crc32(name.encode())) * int(integers.sum(dtype=torch.int64))
            yield name, tensor


def checksum(tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Return the `Checksum` of tensors."""
    total = Checksum(tensors)
    for _ in total:
        pass
    return total.total


def check_arrived(arrived: Sequence[int], sent: int) -> None:
    """Compare the checksum that each process of an engine found with the one that was sent.

    Raises:
        RuntimeError: they differ.
    """
    wanted = sent % CHECKSUMS
    wrong = [number for number, found in enumerate(arrived) if found != wanted]
    if wrong or not arrived:
        raise RuntimeError(
            f"the weights that arrived are not those that were sent: in process {', '.join(map(str, wrong))} of "
            f"{len(arrived)} their checksum is another than {wanted}"
        )


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype
