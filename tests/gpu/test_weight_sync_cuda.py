"""Buckets pass from one process to another by CUDA IPC on one GPU, and by NCCL on two."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d

from fivefold.weights import cuda_ipc
from fivefold.weights.device_buckets import CHECKSUMS, DeviceBucket, checksum
from fivefold.weights.ipc_buffers import IPCSender
from fivefold.weights.nccl_communicator import NcclCommunicator
from fivefold.weights.nccl_link import Invitation, NcclLink
from fivefold.weights.nccl_sender import NCCLSender
from fivefold.weights.stream import stacked
from fivefold.weights.table import TRANSPORTS
from fivefold.weights.transport import Route

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
BUCKET = 1 << 20
ONE = DeviceBucket(("tensor",), ((4, 4),), "bfloat16", {}, None)
WAIT_S = 120


def weights(seed: int) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator("cuda").manual_seed(seed)
    for i in range(40):
        shape = (1000 + 61 * i, 64) if i != 7 else (3 * BUCKET // 64, 64)  # one is larger than a bucket
        yield f"tensor {i}", torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)


def open_buckets(announced: Any, arrived: Any) -> None:
    """Answer each announced bucket with the checksum of what is in its buffer."""
    device = torch.device("cuda", 0)
    while (bucket := announced.get(timeout=WAIT_S)) is not None:
        flat = cuda_ipc.opened(bucket.handles[cuda_ipc.device_uuid(device)], device)
        arrived.put(checksum(bucket.tensors(flat)) % CHECKSUMS)
        del flat


def test_another_process_reads_every_bucket_and_the_memory_comes_back() -> None:
    context = mp.get_context("spawn")
    announced, arrived = context.Queue(), context.Queue()
    reader = context.Process(target=open_buckets, args=(announced, arrived), daemon=True)
    reader.start()
    route = Route(TRANSPORTS["ipc"], "bfloat16", checksum=True)
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated()
    for seed in range(3):
        sender = IPCSender(route, 0, n_buffers=2, max_bytes=BUCKET)
        items = sender.items(stacked(weights(seed)))
        total, bucket = 0, next(items, None)
        while bucket is not None:
            announced.put(bucket)
            upcoming = next(items, None)  # the other buffer is filled while this one is read
            found = arrived.get(timeout=WAIT_S)
            assert found == (bucket.checksum or 0) % CHECKSUMS
            total, bucket = total + found, upcoming
        assert total % CHECKSUMS == checksum(weights(seed)) % CHECKSUMS
        sender.free()
    announced.put(None)
    reader.join(WAIT_S)
    assert reader.exitcode == 0
    gc.collect()
    cuda_ipc.collect()
    assert torch.cuda.memory_allocated() == allocated


def receive(meeting: str, invitation: Invitation, announced: Any, arrived: Any) -> None:
    """Enter the group as a server does, as rank 1 on the second GPU, and answer with checksums."""
    torch.cuda.set_device(1)
    group = communicator = None
    if meeting == "torch_group":
        store = TCPStore(invitation.address, invitation.port, 2, is_master=False)
        prefixed, timeout = c10d.PrefixStore(invitation.group, store), timedelta(seconds=WAIT_S)
        group, _ = c10d._new_process_group_helper(
            2,
            1,
            [],
            c10d.Backend("nccl"),
            prefixed,
            group_name=invitation.group,
            backend_options=None,
            timeout=timeout,  # type: ignore[arg-type]
        )
        c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
    else:
        communicator = NcclCommunicator(invitation.unique_id, 2, rank=1)
        communicator.sum(torch.zeros(1, device="cuda"))
    while (bucket := announced.get(timeout=WAIT_S)) is not None:
        flat = torch.empty(bucket.n_bytes, dtype=torch.uint8, device="cuda")
        if communicator is not None:
            communicator.broadcast(flat, source=0)
        else:
            dist.broadcast(flat, src=0, group=group)
        torch.cuda.synchronize()
        arrived.put(checksum(bucket.tensors(flat)) % CHECKSUMS)


def enter_and_die(meeting: Any, invitation: Invitation) -> None:
    """Enter the group, get one bucket, and end as a server does that is killed."""
    arrived: Any = SimpleQueue()
    announced: Any = SimpleQueue()
    announced.put(ONE)
    announced.put(None)
    receive(meeting, invitation, announced, arrived)
    os._exit(1)


@TWO_GPUS
@pytest.mark.parametrize("meeting", ["unique_id", "vllm_store", "torch_group"])
@pytest.mark.parametrize("dies", [False, True])
def test_another_gpu_gets_every_bucket(meeting: Any, dies: bool) -> None:
    """Behind the death of the process that had the GPU, its successor enters another group."""
    context = mp.get_context("spawn")
    if dies:
        before = NcclLink(meeting, "127.0.0.1", 2, WAIT_S)
        deadly = context.Process(target=enter_and_die, args=(meeting, before.invite()), daemon=True)
        deadly.start()
        before.enter()
        before.broadcast(torch.zeros(ONE.n_bytes, dtype=torch.uint8, device="cuda"))
        deadly.join(WAIT_S)
        assert deadly.exitcode == 1
        before.leave()
    announced, arrived = context.Queue(), context.Queue()
    link = NcclLink(meeting, "127.0.0.1", 2, WAIT_S)
    arguments = (meeting, link.invite(), announced, arrived)
    receiver = context.Process(target=receive, args=arguments, daemon=True)
    receiver.start()
    link.enter()
    route = Route(TRANSPORTS["nccl"], "bfloat16", checksum=True, n_receivers=1)
    sender = NCCLSender(route, 0, WAIT_S, link, max_bytes=BUCKET)
    sent: list[DeviceBucket] = []
    for bucket in sender.items(stacked(weights(0))):  # sends the bucket before
        if sent:
            assert arrived.get(timeout=WAIT_S) == (sent[-1].checksum or 0) % CHECKSUMS
        sent.append(bucket)
        announced.put(bucket)
    assert arrived.get(timeout=WAIT_S) == (sent[-1].checksum or 0) % CHECKSUMS
    announced.put(None)
    receiver.join(WAIT_S)
    assert receiver.exitcode == 0
