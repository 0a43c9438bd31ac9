"""Buckets that stay on the trainer's devices, here on the CPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fivefold.cluster.worker import Feed
from fivefold.weights.copied_weights import CopiedWeights
from fivefold.weights.device_buckets import (
    CHECKSUMS,
    BufferFiller,
    Checksum,
    DeviceBucket,
    check_arrived,
    checksum,
    merged,
)
from fivefold.weights.nccl_sender import NCCLSender
from fivefold.weights.stream import Stack, stacked
from fivefold.weights.table import TRANSPORTS
from fivefold.weights.transport import Route

SIZES = [3, 50, 7, 0, 400, 1, 64, 64, 64, 2]
"""Elements of each tensor; a bucket of 256 bytes holds 128 of bfloat16."""


def tensors(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"tensor {i}": torch.randn(size, 2, generator=generator)[:, 0] for i, size in enumerate(SIZES)}


def bucket_of(rows: list[tuple[str, Tensor]], **fields: object) -> DeviceBucket:
    names, shapes = tuple(name for name, _ in rows), tuple(tuple(tensor.shape) for _, tensor in rows)
    values = {"dtype": "bfloat16", "handles": {}, "checksum": None} | fields
    return DeviceBucket(names, shapes, **values)  # type: ignore[arg-type]


def test_every_tensor_lies_whole_in_one_buffer_where_its_bucket_says() -> None:
    sources, arrived = tensors(), {}
    filler = BufferFiller(stacked(sources.items()), dtype=torch.bfloat16, n_buffers=2, max_bytes=256)
    n_buckets = 0
    while (filled := filler.fill()) is not None:
        rows, buffer = filled
        n_buckets += 1
        assert sum(tensor.nbytes for _, tensor in rows) <= 256 or len(rows) == 1
        arrived |= {name: tensor.clone() for name, tensor in bucket_of(rows).tensors(buffer)}
    assert list(arrived) == list(sources)
    assert all(torch.equal(arrived[name], source.bfloat16()) for name, source in sources.items())
    assert n_buckets == 5


@pytest.mark.parametrize("max_bytes", [1, 100, 256, 10_000])
def test_stacks_fill_the_same_buckets_as_their_tensors_alone(max_bytes: int) -> None:
    """Stacks are cut where a bucket is full; an empty tensor takes no room."""
    stacks = [
        Stack([f"{letter} {i}" for i in range(count)], torch.randn(count, *shape))
        for letter, count, shape in [("a", 1, (7,)), ("b", 12, (3, 2)), ("c", 3, (0,)), ("d", 5, (4, 4))]
    ]
    sources = [pair for stack in stacks for pair in zip(stack.names, stack.tensors, strict=True)]
    filled = []
    for weights in (stacks, stacked(sources)):
        filler = BufferFiller(weights, dtype=torch.bfloat16, n_buffers=1, max_bytes=max_bytes)
        buckets = []
        while (bucket := filler.fill()) is not None:
            buckets.append([(name, tensor.clone()) for name, tensor in bucket[0]])
        filled.append(buckets)
    names = [[[name for name, _ in bucket] for bucket in buckets] for buckets in filled]
    assert names[0] == names[1]
    for buckets in filled:
        arrived = [pair for bucket in buckets for pair in bucket]
        assert [name for name, _ in arrived] == [name for name, _ in sources]
        assert all(torch.equal(one, two.bfloat16()) for (_, one), (_, two) in zip(arrived, sources, strict=True))


def test_a_bucket_stays_as_it_is_while_the_next_is_filled_and_not_longer() -> None:
    filler = BufferFiller(stacked(tensors().items()), dtype=torch.float32, n_buffers=2, max_bytes=256)
    buffers = []
    copies = []
    while (filled := filler.fill()) is not None:
        buffers.append(filled[1])
        copies.append(filled[1].clone())
        if len(buffers) > 1:
            assert torch.equal(buffers[-2], copies[-2])
            assert buffers[-2].data_ptr() != buffers[-1].data_ptr()
    assert len({buffer.data_ptr() for buffer in buffers[-4::2]}) == 1


@pytest.mark.parametrize("max_bytes", [64, 200, 328, 400, 10_000])
def test_projections_that_a_server_fuses_are_in_one_bucket(max_bytes: int) -> None:
    names = ["embed"]
    for layer in range(3):
        projections = ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")
        names += [f"model.layers.{layer}.self_attn.{projection}.weight" for projection in projections]
    sources = {name: torch.randn(20 + 3 * i) for i, name in enumerate(names)}
    filler = BufferFiller(stacked(sources.items()), dtype=torch.float32, n_buffers=2, max_bytes=max_bytes)
    arrived, last, n_buckets = {}, None, 0
    while (filled := filler.fill()) is not None:
        rows, buffer = filled
        assert last is None or torch.equal(*last), "the buffer that an engine may be reading was filled"
        last = buffer, buffer.clone()
        arrived |= {name: tensor.clone() for name, tensor in bucket_of(rows, dtype="float32").tensors(buffer)}
        fused = [name.split(".self_attn")[0] for name, _ in rows if "_a_proj" in name]
        assert all(fused.count(layer) == 2 for layer in fused)
        n_buckets += 1
    assert list(arrived) == names
    assert all(torch.equal(arrived[name], source) for name, source in sources.items())
    assert (n_buckets == 1) == (max_bytes == 10_000)


def test_a_slow_engine_reads_what_was_sent_while_the_next_bucket_is_filled() -> None:
    """The feed hands over a bucket once the one before it is loaded, which is when its buffer may be filled again."""
    sources = tensors()
    filler = BufferFiller(stacked(sources.items()), dtype=torch.float32, n_buffers=2, max_bytes=256)
    feed, arrived, n_filled = Feed(), {}, threading.Semaphore(0)

    def load() -> None:
        for number, (rows, buffer) in enumerate(feed):
            # The engine is so slow that it reads a bucket only once the next one is filled.
            for _ in range(2 if number == 0 else 1):
                assert n_filled.acquire(timeout=120)
            arrived.update({name: tensor.clone() for name, tensor in bucket_of(rows, dtype="float32").tensors(buffer)})

    reader = threading.Thread(target=load)
    reader.start()
    while (filled := filler.fill()) is not None:
        n_filled.release()
        feed.put(filled)
    n_filled.release()
    feed.end()
    reader.join()
    assert all(torch.equal(arrived[name], source) for name, source in sources.items())


def test_handles_of_all_ranks_are_merged() -> None:
    rows = [("a", torch.zeros(2))]
    parts = [bucket_of(rows, handles={"uuid-0": (0,)}), bucket_of(rows), bucket_of(rows, handles={"uuid-2": (2,)})]
    assert merged(parts) == bucket_of(rows, handles={"uuid-0": (0,), "uuid-2": (2,)})
    assert merged([None, None]) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_checksum_tells_lost_stale_and_mixed_up_tensors(dtype: torch.dtype) -> None:
    rows = [(name, tensor.to(dtype)) for name, tensor in tensors().items()]
    total = checksum(rows)
    assert total == checksum(reversed(rows))
    stale = [(name, tensor.to(dtype)) for name, tensor in tensors(seed=1).items()]
    mixed_up = [(rows[1][0], rows[2][1]), (rows[2][0], rows[1][1]), rows[0], *rows[3:]]
    for wrong in (rows[:-1], stale, mixed_up):
        assert checksum(wrong) % CHECKSUMS != total % CHECKSUMS
    silent = Checksum(rows, is_wanted=False)
    assert [name for name, _ in silent] == [name for name, _ in rows]
    assert silent.total == 0


def test_each_process_of_an_engine_must_have_got_what_was_sent() -> None:
    check_arrived([5, 5], CHECKSUMS + 5)
    with pytest.raises(RuntimeError, match="in process 1 of 2"):
        check_arrived([5, 6], 5)
    with pytest.raises(RuntimeError, match="not those that were sent"):
        check_arrived([], 5)


class RecordingLink:
    def __init__(self) -> None:
        self.sent: list[Tensor] = []

    def broadcast(self, flat: Tensor) -> None:
        self.sent.append(flat.clone())


def test_a_sender_broadcasts_each_bucket_after_it_was_announced() -> None:
    sources, link = tensors(), RecordingLink()
    route = Route(TRANSPORTS["nccl"], "bfloat16", checksum=True)
    sender = NCCLSender(route, 0, 1.0, link, max_bytes=256).items(stacked(sources.items()))
    outlines = {name: tensor.to("meta") for name, tensor in sources.items()}
    other = NCCLSender(route, 1, 1.0, max_bytes=256).items(stacked(outlines.items()))
    announced: list[DeviceBucket] = []
    for bucket in sender:
        outline = next(other)
        assert outline == replace(bucket, checksum=None)
        assert merged([bucket, outline]) == merged([outline, bucket]) == bucket
        assert len(link.sent) == len(announced)
        announced.append(bucket)
    assert next(other, None) is None
    arrived = {
        name: tensor for bucket, flat in zip(announced, link.sent, strict=True) for name, tensor in bucket.tensors(flat)
    }
    assert all(torch.equal(arrived[name], source.bfloat16()) for name, source in sources.items())
    assert sum(bucket.checksum or 0 for bucket in announced) == checksum(arrived.items())


def test_a_copy_is_sent_as_it_was_when_the_weights_have_changed() -> None:
    link = RecordingLink()
    copy, route = CopiedWeights(link, max_bytes=256), Route(TRANSPORTS["nccl"], "bfloat16", checksum=True)
    for version in range(2):
        sources = {name: tensor + version for name, tensor in tensors().items()}
        wanted = {name: tensor.bfloat16() for name, tensor in sources.items()}
        copy.fill(stacked(sources.items()), route)
        for tensor in sources.values():
            tensor.zero_()
        link.sent.clear()
        announced: list[DeviceBucket] = []
        while (bucket := copy.next()) is not None:
            assert len(link.sent) == len(announced)
            announced.append(bucket)
        assert len(link.sent) == len(announced) > 1
        arrived = {
            name: tensor
            for bucket, flat in zip(announced, link.sent, strict=True)
            for name, tensor in bucket.tensors(flat)
        }
        assert arrived.keys() == wanted.keys()
        assert all(torch.equal(arrived[name], tensor) for name, tensor in wanted.items())
        assert sum(bucket.checksum or 0 for bucket in announced) == checksum(wanted.items())
    assert copy.next() is None


@pytest.mark.parametrize("reads", [True, False])
def test_offsets_of_routers_come_last_and_stay_float32(reads: bool) -> None:
    sources = tensors()
    names = list(sources)
    offsets = {f"model.layers.{n}.mlp.gate.e_score_correction_bias": torch.rand(5) + n for n in range(2)}
    mixed = dict([*list(sources.items())[:4], *offsets.items(), *list(sources.items())[4:]])
    route, link = Route(TRANSPORTS["nccl"], "bfloat16", checksum=False), RecordingLink()
    if reads:
        copy = CopiedWeights(link, max_bytes=256)
        copy.fill(stacked(mixed.items()), route)
        announced = list(iter(copy.next, None))
    else:
        outlines = {name: tensor.to("meta") for name, tensor in mixed.items()}
        announced = list(NCCLSender(route, 1, 1.0, max_bytes=256).items(stacked(outlines.items())))
    assert [name for bucket in announced for name in bucket.names] == [*names, *offsets]
    assert [bucket.dtype for bucket in announced] == [*["bfloat16"] * (len(announced) - 1), "float32"]
    assert announced[-1].names == tuple(offsets)
    if reads:
        arrived = dict(announced[-1].tensors(link.sent[-1]))
        assert all(torch.equal(arrived[name], tensor) for name, tensor in offsets.items())


def test_a_failure_of_the_weights_is_the_senders() -> None:
    def weights() -> Iterator[tuple[str, Tensor]]:
        yield "a", torch.zeros(3)
        raise ValueError("a parameter is missing")

    with pytest.raises(ValueError, match="a parameter is missing"):
        list(NCCLSender(Route(TRANSPORTS["nccl"], "float32", checksum=False), 0, 1.0).items(stacked(weights())))
