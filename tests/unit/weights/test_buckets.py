"""Buckets carry any tensor bit for bit, and never exceed their size."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fivefold.weights.buckets import Bucket, pack, unpack
from fivefold.weights.stream import Stack, stacked
from fivefold.weights.table import TRANSPORTS
from fivefold.weights.transport import Route

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Return a tensor of random bits, which may be NaNs; for bool, of zeros and ones."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    n_bytes = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (n_bytes,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(received: list[tuple[str, Tensor]], sent: list[tuple[str, Tensor]]) -> None:
    assert [name for name, _ in received] == [name for name, _ in sent]
    for (_, got), (_, wanted) in zip(received, sent, strict=True):
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        assert raw(got) == raw(wanted)


shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), max_size=8), st.integers(16, 300))
def test_any_tensors_survive_any_bucket_size(specs: list[tuple[tuple[int, ...], torch.dtype]], max_bytes: int) -> None:
    sent = [(f"t{i}", random_bits(shape, dtype, i)) for i, (shape, dtype) in enumerate(specs)]
    buckets = list(pack(sent, max_bytes))
    assert all(bucket.data.nbytes <= max_bytes for bucket in buckets)
    assert_same(list(unpack(buckets)), sent)


def test_strided_tensors_arrive_contiguous() -> None:
    matrix = random_bits((6, 8), torch.bfloat16, 0)
    sent = [("transposed", matrix.T), ("column", matrix[:, 3]), ("expanded", matrix[:1].expand(5, 8))]
    assert_same(list(unpack(pack(sent, 64))), sent)


def test_small_tensors_share_a_bucket_and_stay_whole() -> None:
    sent = [(f"t{i}", torch.full((10,), float(i))) for i in range(7)]
    buckets = list(pack(sent, 100))
    assert [len(bucket.entries) for bucket in buckets] == [2, 2, 2, 1]
    assert all(entry.n_bytes == 40 and entry.offset % 16 == 0 for bucket in buckets for entry in bucket.entries)


def test_a_source_may_reuse_its_memory() -> None:
    def weights() -> Iterator[tuple[str, Tensor]]:
        buffer = torch.empty(4)
        for i in range(5):
            yield f"t{i}", buffer.fill_(i)

    received = list(unpack(list(pack(weights(), 1000))))
    assert [tensor.tolist() for _, tensor in received] == [[float(i)] * 4 for i in range(5)]


def test_pickling_moves_the_bytes_out_of_band_and_reading_them_does_not_copy() -> None:
    (bucket,) = pack([("w", torch.arange(1000.0))], 10_000)
    buffers: list[pickle.PickleBuffer] = []
    header = pickle.dumps(bucket, protocol=5, buffer_callback=buffers.append)
    assert len(header) < 1000
    frozen = bytes(buffers[0].raw())
    received: Bucket = pickle.loads(header, buffers=[frozen])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ((_, tensor),) = unpack([received])
    assert not received.data.flags.writeable
    assert tensor.data_ptr() == received.data.ctypes.data
    assert torch.equal(tensor, torch.arange(1000.0))


def test_missing_buckets_are_errors() -> None:
    buckets = list(pack([("large", torch.arange(100.0)), ("small", torch.ones(2))], 128))
    assert len(buckets) > 3
    with pytest.raises(ValueError, match="256 bytes into tensor 'large' of 400 bytes"):
        list(unpack(buckets[:2]))
    with pytest.raises(ValueError, match="continues tensor 'large' at byte 256, but 128"):
        list(unpack([buckets[0], *buckets[2:]]))


def test_a_limit_below_the_alignment_is_refused() -> None:
    with pytest.raises(ValueError, match="max_bytes=8 is below 16"):
        next(pack([("w", torch.ones(1))], 8))


def test_a_bucket_that_was_changed_on_its_way_is_an_error() -> None:
    weights = {"a": torch.arange(6.0), "b": torch.ones(5)}
    buckets = list(pack(weights.items(), 64, with_checksum=True))
    assert {name: tensor.tolist() for name, tensor in unpack(buckets)} == {k: v.tolist() for k, v in weights.items()}
    buckets[-1].data[-1] ^= 1
    with pytest.raises(RuntimeError, match="the weights that arrived are not those that were sent"):
        list(unpack(buckets))


@pytest.mark.parametrize("name", [name for name, transport in TRANSPORTS.items() if transport.carries_weights])
def test_a_transport_that_carries_weights_brings_their_bits_from_one_rank_while_the_others_gather(name: str) -> None:
    transport, n_gathered = TRANSPORTS[name], [0, 0]
    sent = [(f"t{i}", random_bits((3, i), torch.bfloat16, i)) for i in range(5)]

    def gathered(rank: int) -> Iterator[Stack]:
        for stack in stacked(sent):
            n_gathered[rank] += 1
            yield stack

    route = Route(transport, "bfloat16", checksum=True)
    items, nothing = (list(transport.sender(route, rank, 1.0).items(gathered(rank))) for rank in range(2))
    assert nothing == []
    assert n_gathered == [5, 5]
    assert_same(list(transport.receiver()(iter(items), torch.device("cpu"))), sent)
