"""The trainer's end of an NCCL group with inference servers, as rank 0.

Servers enter the group in different ways, each a `Meeting`:

    unique_id      vLLM 0.26 and later take NCCL's id of the group
    vllm_store     vLLM 0.25 reads that id, as an object of a vLLM class, from a store that the trainer opens
    torch_group    SGLang makes a group of torch.distributed over a store that the trainer opens

A group is useless once a process in it has died. All others then enter another one, with its successor.
"""

from __future__ import annotations

import base64
import ctypes
import itertools
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d

from fivefold.weights.nccl_communicator import ID_BYTES, NcclCommunicator, new_unique_id
from fivefold.weights.stand_in import pickled

Meeting = Literal["unique_id", "vllm_store", "torch_group"]

_numbers = itertools.count()


@dataclass(frozen=True)
class Invitation:
    """What servers need to know to enter the group."""

    address: str
    """Host of the store, which rank 0 has opened."""
    port: int
    unique_id: bytes
    """NCCL's id of the group."""
    world_size: int
    """Processes of all servers, and rank 0."""
    group: str
    """Name of the group of torch.distributed, which no earlier one has."""

    @property
    def unique_id_b64(self) -> str:
        """NCCL's id as base64."""
        return base64.b64encode(self.unique_id).decode()


class ncclUniqueId(ctypes.Structure):
    """NCCL's id of a group, as vLLM reads it."""

    _fields_: ClassVar = [("internal", ctypes.c_byte * ID_BYTES)]


ncclUniqueId.__module__ = "vllm.distributed.device_communicators.pynccl_wrapper"


class NcclLink:
    """Rank 0 of the group. `invite`, then `enter` at the same time as the servers, then `broadcast`."""

    def __init__(self, meeting: Meeting, address: str, world_size: int, timeout_s: float) -> None:
        """Open the store.

        Args:
            meeting: how the servers enter.
            address: the address of this host for the servers'.
            world_size: processes of all servers, and this one.
            timeout_s: longest wait for the servers, in seconds.
        """
        self._meeting = meeting
        self._world_size = world_size
        self._timeout = timedelta(seconds=timeout_s)
        # Port 0: any free one, which is this store's from the start.
        self._store = TCPStore(
            address, 0, world_size, is_master=True, timeout=self._timeout, wait_for_workers=False, use_libuv=False
        )
        unique_id = new_unique_id() if meeting != "torch_group" else b""
        group = f"fivefold_weights_{next(_numbers)}"
        self._invitation = Invitation(address, self._store.port, unique_id, world_size, group)
        self._communicator: NcclCommunicator | None = None
        self._group: Any = None
        if meeting == "vllm_store":
            self._store.set("broadcast_from/0/0", pickled_id(unique_id))  # type: ignore[arg-type]

    def invite(self) -> Invitation:
        """Return what the servers need to know."""
        return self._invitation

    def enter(self) -> None:
        """Enter the group; return once all servers have."""
        if self._meeting == "torch_group":
            self._group = _torch_group(self._invitation.group, self._store, self._world_size, self._timeout)
            return
        self._communicator = NcclCommunicator(self._invitation.unique_id, self._world_size, rank=0)
        # The servers' communicators begin with the sum of one number.
        self._communicator.sum(torch.zeros(1, device="cuda"))
        torch.cuda.synchronize()

    def broadcast(self, flat: Tensor) -> None:
        """Send a flat uint8 tensor to all servers, and wait until it has gone."""
        if self._communicator is not None:
            self._communicator.broadcast(flat, source=0)
        else:
            dist.broadcast(flat, src=0, group=self._group)
        # Training may run in parallel, on other streams.
        torch.cuda.current_stream().synchronize()

    def leave(self) -> None:
        """Leave the group, in which nothing is on its way; its other processes may have died."""
        if self._communicator is not None:
            self._communicator.abort()
        elif self._group is not None:
            c10d._abort_process_group(self._group)


def pickled_id(unique_id: bytes) -> bytes:
    """Return NCCL's id as a pickle of vLLM's class for it."""
    return pickled(ncclUniqueId.from_buffer_copy(unique_id), ncclUniqueId)


def _torch_group(name: str, store: TCPStore, world_size: int, timeout: timedelta) -> Any:
    """Make a second group of torch.distributed, as SGLang's `init_custom_process_group` does."""
    group, _ = c10d._new_process_group_helper(
        world_size,
        0,
        [],
        c10d.Backend("nccl"),
        c10d.PrefixStore(name, store),
        group_name=name,  # type: ignore[arg-type]
        backend_options=None,
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group
