"""Weights that NCCL broadcasts from a copy in host memory, in parallel with training.

trainer's host     tensors ──fill──> bucket, bucket, ...    pinned memory, which the next version fills again
its device         one buffer  <──────── next ────┘ ──broadcast──> engines        on a separate stream
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fivefold.weights.device_buckets import BufferFiller, DeviceBucket
from fivefold.weights.nccl_link import NcclLink
from fivefold.weights.pinned import host_zeros
from fivefold.weights.stream import Stack
from fivefold.weights.transport import DEVICE_BYTES, Route


class CopiedWeights:
    """The sending rank's copy of all weights of one version: call `fill`, then `next` until nothing is left.

    `next` may run in another thread than training. Its kernels are on a separate stream: a broadcast waits until all
    engines are ready, and would hold up every kernel after it.
    """

    def __init__(self, link: NcclLink, max_bytes: int = DEVICE_BYTES) -> None:
        """Begin without a copy.

        Args:
            link: the connection to the engines.
            max_bytes: bytes of a bucket, unless a tensor is larger.
        """
        self.link = link
        """The connection for the next bucket; it may be replaced between two transfers."""
        self._max_bytes = max_bytes
        self._memory: list[Tensor] = []
        """uint8 each, in host memory: the bytes of one bucket."""
        self._waiting: deque[tuple[DeviceBucket, Tensor]] = deque()
        """Buckets that are not announced yet, with their bytes."""
        self._announced: Tensor | None = None
        """The bytes of the bucket that is announced and not sent, on the device."""
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None

    def fill(self, weights: Iterable[Stack], route: Route) -> None:
        """Copy all tensors, cast to the route's dtype; the trainer may change them then."""
        filler = BufferFiller(weights, dtype=getattr(torch, route.dtype), n_buffers=1, max_bytes=self._max_bytes)
        for tensors, buffer in filler:
            bucket = DeviceBucket.of(tensors, {}, with_checksum=route.checksum)
            memory = self._host_memory(len(self._waiting), bucket.n_bytes, pinned=buffer.is_cuda)
            memory.copy_(buffer[: bucket.n_bytes])
            self._waiting.append((bucket, memory))
        if self._waiting:
            most = max(bucket.n_bytes for bucket, _ in self._waiting)
            if self._buffer.numel() < most:
                self._buffer = torch.empty(most, dtype=torch.uint8, device=buffer.device)

    def next(self) -> DeviceBucket | None:
        """Broadcast the bucket that the last call announced, and announce the next one, as `NCCLSender.items`.

        Returns:
            The announcement of the next bucket; None: there is none, and all are sent.
        """
        with self._own_stream():
            if self._announced is not None:
                self.link.broadcast(self._announced)
                self._announced = None
            if not self._waiting:
                return None
            bucket, memory = self._waiting.popleft()
            self._announced = self._buffer[: bucket.n_bytes]
            self._announced.copy_(memory, non_blocking=True)
        return bucket

    def _host_memory(self, index: int, n_bytes: int, *, pinned: bool) -> Tensor:
        """Return the memory of a bucket, which has the same size in every version."""
        if index == len(self._memory):
            self._memory.append(host_zeros(n_bytes, torch.uint8, pinned=pinned))
        return self._memory[index][:n_bytes]

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        """Run the kernels of the block on the stream of the broadcasts."""
        if self._stream is None:
            yield
        else:
            with torch.cuda.stream(self._stream):
                yield
