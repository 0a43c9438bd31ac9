"""The trainer's end of NCCL: rank 0 broadcasts each bucket after the engines have taken its announcement."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

import torch

from fivefold.weights.copied_weights import CopiedWeights
from fivefold.weights.device_buckets import BufferFiller, DeviceBucket
from fivefold.weights.nccl_link import Invitation, Meeting, NcclLink
from fivefold.weights.stream import CollectiveSender, Stack
from fivefold.weights.transport import DEVICE_BYTES, Route


class NCCLSender(CollectiveSender):
    """Broadcasts on the rank that has a link; the others fill no buffers, because their weights are outlines."""

    def __init__(
        self, route: Route, rank: int, timeout_s: float, link: NcclLink | None = None, max_bytes: int = DEVICE_BYTES
    ) -> None:
        """Begin without a copy.

        Args:
            route: how the weights travel.
            rank: the rank of this process in the trainer.
            timeout_s: longest wait for the engines when a link is opened, in seconds.
            link: the connection to the engines; None: `open_link` makes it.
            max_bytes: bytes of a buffer, unless a tensor is larger.
        """
        self._route, self._rank, self._timeout_s, self._max_bytes = route, rank, timeout_s, max_bytes
        self.link = link
        self._left: list[NcclLink] = []
        """Links to groups that were left, whose stores engines may still watch."""
        self._copy: CopiedWeights | None = None

    def items(self, weights: Iterable[Stack]) -> Iterator[DeviceBucket]:
        """Yield announcements; a bucket is broadcast when the next one is asked for."""
        dtype = getattr(torch, self._route.dtype)
        with_checksum = self._route.checksum and self._rank in self._route.readers
        for tensors, buffer in BufferFiller(weights, dtype=dtype, n_buffers=1, max_bytes=self._max_bytes):
            bucket = DeviceBucket.of(tensors, {}, with_checksum=with_checksum)
            yield bucket
            if self.link is not None:
                self.link.broadcast(buffer[: bucket.n_bytes])

    def free(self) -> None:
        """Give the memory of the buffer back."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def copy(self, weights: Iterable[Stack]) -> None:
        """Copy all weights to host memory on the rank that has a link; the trainer may change them then."""
        if self._copy is None and self.link is not None:
            self._copy = CopiedWeights(self.link, self._max_bytes)
        if self._copy is not None:
            self._copy.fill(weights, self._route)
        else:
            for _ in weights:
                pass

    def next_copied(self) -> DeviceBucket | None:
        """Broadcast the copied bucket that was announced last, and announce the next one; any thread may call it.

        None: all are sent, or this rank sends none.
        """
        return None if self._copy is None else self._copy.next()

    def open_link(self, meeting: Meeting) -> Invitation | None:
        """Open the store of a group with the processes of all engines, on rank 0.

        It replaces the group before, which a process of the engines may have left by its death.
        """
        if self._rank != 0:
            return None
        if self.link is not None:
            self.link.leave()
            self._left.append(self.link)
        self.link = NcclLink(meeting, os.environ["MASTER_ADDR"], 1 + self._route.n_receivers, self._timeout_s)
        if self._copy is not None:
            self._copy.link = self.link
        return self.link.invite()

    def enter_link(self) -> None:
        """Enter the group, on rank 0, together with the engines."""
        if self.link is not None:
            self.link.enter()
