"""The part of a trainer's worker that sends weights to a rollout."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

from fivefold.engine.contract import TrainingEngine
from fivefold.weights import cuda_ipc
from fivefold.weights.buckets import Bucket, pack
from fivefold.weights.copied_weights import CopiedWeights
from fivefold.weights.device_buckets import DeviceBucket
from fivefold.weights.host_memory import HOST_BYTES, THROUGH_HOST
from fivefold.weights.nccl_link import Invitation, Meeting, NcclLink
from fivefold.weights.sender import WeightSender
from fivefold.weights.transport import Route


class SendsWeights:
    """Sends the weights of an engine. All ranks take part in every method, unless it says otherwise."""

    def __init__(self, engine: TrainingEngine, timeout_s: float) -> None:
        """Begin without a link; one that is opened waits `timeout_s` for the rollout."""
        self._engine = engine
        self._timeout_s = timeout_s
        self._sender: WeightSender | None = None
        self._link: NcclLink | None = None
        self._left: list[NcclLink] = []
        """Links to groups that were left, whose stores processes of the rollout may still watch."""
        self._copy: CopiedWeights | None = None

    def offer_weights(self, with_checksum: bool) -> Iterator[Bucket]:
        """Yield all weights under their Hugging Face names, on rank 0; other ranks take part and yield nothing."""
        weights = self._engine.export_weights(THROUGH_HOST.readers)
        if dist.get_rank() in THROUGH_HOST.readers:
            yield from pack(weights, HOST_BYTES, with_checksum=with_checksum)
        else:
            for _ in weights:
                yield from ()

    def next_bucket(self, route: Route) -> DeviceBucket | None:
        """Announce the next bucket of all weights; see `WeightSender.next`. None: all are sent."""
        if self._sender is None:
            weights = self._engine.export_stacks(route.readers)
            self._sender = WeightSender(weights, route, dist.get_rank(), self._link)
        return self._sender.next()

    def copy_weights(self, route: Route) -> None:
        """Copy all weights to host memory, on the rank that has a link."""
        weights = self._engine.export_stacks(route.readers)
        if self._copy is None and self._link is not None:
            self._copy = CopiedWeights(self._link)
        if self._copy is not None:
            self._copy.fill(weights, route)
        else:
            for _ in weights:
                pass

    def next_copied(self) -> DeviceBucket | None:
        """Announce the next bucket of the copied weights; see `WeightSender.next`. It runs beside other methods.

        None: all are sent, or this rank sends none.
        """
        return None if self._copy is None else self._copy.next()

    def free_buckets(self) -> None:
        """Free the buffers of the buckets, which every engine has loaded."""
        self._sender = None
        if torch.cuda.is_available():
            cuda_ipc.collect()
            torch.cuda.empty_cache()

    def open_link(self, meeting: Meeting, n_receivers: int) -> Invitation | None:
        """Open the store of an NCCL group with `n_receivers` processes of the rollout, on rank 0.

        It takes the place of the group before, which a process of the rollout may have left by its death.
        """
        if dist.get_rank() != 0:
            return None
        if self._link is not None:
            self._link.leave()
            self._left.append(self._link)
        self._link = NcclLink(meeting, os.environ["MASTER_ADDR"], 1 + n_receivers, self._timeout_s)
        if self._copy is not None:
            self._copy.link = self._link
        return self._link.invite()

    def enter_link(self) -> None:
        """Enter the NCCL group, on rank 0, together with the rollout."""
        if self._link is not None:
            self._link.enter()
