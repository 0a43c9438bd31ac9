"""The trainer's side of `ipc` and `nccl`: one bucket at a time, on every rank at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from fivefold.weights import cuda_ipc
from fivefold.weights.device_buckets import BufferFiller, DeviceBucket, checksum, dtype_of
from fivefold.weights.ipc import N_BUFFERS
from fivefold.weights.stacks import Stack
from fivefold.weights.transport import DEVICE_BYTES, Route


class Link(Protocol):
    """The trainer's end of a connection to all engines."""

    def broadcast(self, flat: Tensor) -> None:
        """Send a flat uint8 tensor to all engines, and wait until it has gone."""


class WeightSender:
    """Sends all weights of one version. All ranks call it in lock-step, because gathering the weights is collective.

    Ranks that send nothing copy nothing: their weights are outlines, which fill the same buckets without content.
    """

    def __init__(
        self,
        weights: Iterable[Stack],
        route: Route,
        rank: int,
        link: Link | None,
        max_bytes: int = DEVICE_BYTES,
    ) -> None:
        """Begin to gather.

        Args:
            weights: all tensors, under their names in Hugging Face files; outlines on `meta` unless the rank is one of
                `route.readers`.
            route: how they travel.
            rank: the rank of this process in the trainer.
            link: with `nccl`, the connection to the engines on the rank that sends; None on the others.
            max_bytes: bytes of a buffer, unless a tensor is larger.
        """
        self._route = route
        self._reads = rank in route.readers
        self._exports = self._reads and route.transport.passes_handles
        self._link = link
        n_buffers = N_BUFFERS if route.transport.passes_handles else 1
        dtype = getattr(torch, route.dtype)
        self._filler = BufferFiller(weights, dtype=dtype, n_buffers=n_buffers, max_bytes=max_bytes)
        self._announced: Tensor | None = None

    def next(self) -> DeviceBucket | None:
        """Send the bucket that the last call announced, if it travels by NCCL; announce the next one.

        Call it once the engines are loading the last bucket, and therefore have loaded the one before it.

        Returns:
            The announcement of the next bucket; None: there is none, and all are sent.
        """
        if self._announced is not None and self._link is not None:
            self._link.broadcast(self._announced)
        filled = self._filler.fill()
        if filled is None:
            self._announced = None
            return None
        tensors, buffer = filled
        bucket = DeviceBucket(
            names=tuple(name for name, _ in tensors),
            shapes=tuple(tuple(tensor.shape) for _, tensor in tensors),
            dtype=dtype_of(tensors),
            # A handle that nobody opens would keep its buffer's memory forever.
            handles={cuda_ipc.device_uuid(buffer.device): cuda_ipc.exported(buffer)} if self._exports else {},
            checksum=checksum(tensors) if self._route.checksum and self._reads else None,
        )
        self._announced = buffer[: bucket.n_bytes]
        return bucket
