"""Both ends of CUDA IPC: a trainer's rank fills buffers, and an engine in another process reads them in place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from fivefold.weights import cuda_ipc
from fivefold.weights.device_buckets import CHECKSUMS, BufferFiller, Checksum, DeviceBucket, check_arrived
from fivefold.weights.stream import Sender, Stack
from fivefold.weights.transport import DEVICE_BYTES, Route


class IPCSender(Sender):
    """Fills the same buckets on every rank; those that share their GPU with an engine hand out handles."""

    def __init__(self, route: Route, rank: int, n_buffers: int, max_bytes: int = DEVICE_BYTES) -> None:
        """Take a place in the trainer.

        Args:
            route: how the weights travel.
            rank: the rank of this process in the trainer.
            n_buffers: buffers that are filled in turn.
            max_bytes: bytes of a buffer, unless a tensor is larger.
        """
        self._route = route
        self._reads = rank in route.readers
        self._n_buffers, self._max_bytes = n_buffers, max_bytes
        self._filler: BufferFiller | None = None
        """Keeps the buffers until `free`: engines still read the last ones after the last item."""

    def items(self, weights: Iterable[Stack]) -> Iterator[DeviceBucket]:
        """Yield announcements. A buffer is filled again after one bucket in each of the others."""
        dtype = getattr(torch, self._route.dtype)
        self._filler = BufferFiller(weights, dtype=dtype, n_buffers=self._n_buffers, max_bytes=self._max_bytes)
        for tensors, buffer in self._filler:
            # CUDA would keep the memory of a handle forever that nobody opens.
            handles = {cuda_ipc.device_uuid(buffer.device): cuda_ipc.exported(buffer)} if self._reads else {}
            yield DeviceBucket.of(tensors, handles, with_checksum=self._route.checksum and self._reads)

    def free(self) -> None:
        """Free the buffers, and what all engines have released of the memory that they opened."""
        self._filler = None
        if torch.cuda.is_available():
            cuda_ipc.collect()
            torch.cuda.empty_cache()


def opened_tensors(buckets: Iterator[DeviceBucket], device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of buckets in buffers that the trainer has on `device`.

    Raises:
        RuntimeError: what arrived is not what was sent.
    """
    uuid = cuda_ipc.device_uuid(device)
    for bucket in buckets:
        flat = cuda_ipc.opened(bucket.handles[uuid], device)
        arrived = Checksum(bucket.tensors(flat), bucket.checksum is not None)
        yield from arrived
        if device.type == "cuda":  # the trainer fills the buffer again once the copies are made
            torch.cuda.synchronize(device)
        if bucket.checksum is not None:
            check_arrived([arrived.total % CHECKSUMS], bucket.checksum)
