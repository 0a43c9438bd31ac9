"""Estimated times of generation, against runs on two H200s (benchmarks/README.md)."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from fivefold.families.read import find_shape
from fivefold.layout.gpus import find_gpu
from fivefold.layout.parser import parse_role
from fivefold.planning.generation_time import reading_seconds, sending_seconds, token_seconds
from fivefold.planning.rollout_memory import rollout_memory

GPU = find_gpu("h200")


def decoding(n_layers: int, layout_text: str = "vllm:d2", tp_on_node: int | None = None) -> tuple[float, ...]:
    """Return the time of a token of Qwen3-30B-A3B with 190 tokens of prompt, halfway through 1,024 of a response."""
    whole = find_shape("Qwen3-30B-A3B")
    shape = replace(whole, n_layers=n_layers, moe_layers=whole.moe_layers[:n_layers])
    layout = parse_role(layout_text).resolve()
    memory = rollout_memory(layout, shape, GPU, sequence_length=1214, batch_size=256, element_bytes=2)
    return token_seconds(
        layout, shape, GPU, memory, sequence_length=1214, context=702, slots=256, element_bytes=2,
        tp_on_node=tp_on_node or layout.tp,
    )  # fmt: skip


@pytest.mark.parametrize(("n_layers", "seconds"), [(8, 12.1), (48, 32.0)])
def test_decoding_takes_what_was_measured(n_layers: int, seconds: float) -> None:
    """512 responses of 1,024 tokens on two replicas: vLLM alone, and the rollout phase of the whole model."""
    assert 1024 * decoding(n_layers)[256] == pytest.approx(seconds, rel=0.15)


def test_fewer_sequences_are_faster_but_not_in_proportion() -> None:
    times = decoding(48)
    assert all(fewer < more for fewer, more in pairwise(times))
    assert times[1] > times[256] / 10
    assert decoding(48, "vllm:d1t2")[256] < times[256]


def test_tensor_parallel_groups_that_cross_nodes_wait_for_the_network() -> None:
    """Two sums in each of 48 layers of 2,048 bfloat16 numbers a token; 7 of 8 parts of them go out twice."""
    inside, across = (decoding(48, "vllm:d1t8", tp_on_node)[256] for tp_on_node in (8, 4))
    n_bytes = 256 * 2 * 48 * 2048 * 2 * 2 * 7 / 8
    assert across - inside == pytest.approx(n_bytes / (0.75 * 4 * GPU.network))


def test_new_weights_take_what_was_measured() -> None:
    """Nine seconds for the whole model, the first time."""
    shape = find_shape("Qwen3-30B-A3B")
    assert sending_seconds(shape, 2) == pytest.approx(9.0, rel=0.15)
    one, two = (reading_seconds(parse_role(text).resolve(), shape, GPU) for text in ("vllm:d1", "vllm:d1t2"))
    assert one == 2 * two
