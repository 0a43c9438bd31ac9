"""Traffic of a step against bytes counted by hand, and the time that it takes."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations
from statistics import fmean

import pytest

from fivefold.families.read import find_shape
from fivefold.families.shape import ModelShape
from fivefold.layout.gpus import find_gpu
from fivefold.layout.parallel import ParallelLayout
from fivefold.layout.parser import parse_backend
from fivefold.planning.groups import from_node_start, ranks_together
from fivefold.planning.stages import stages
from fivefold.planning.timing import StepTime, step_time
from fivefold.planning.traffic import Traffic, step_traffic
from fivefold.planning.workload import Workload

WORK = Workload(4096, 64, 8192)
H200 = find_gpu("h200")


def traffic(backend: str, name: str = "Qwen3-30B-A3B", stage: int = 0, work: Workload = WORK) -> dict[str, Traffic]:
    layout, shape = parse_backend(backend), find_shape(name)
    together = ranks_together(from_node_start(layout, 8), is_moe=shape.is_moe)
    return {item.dimension: item for item in step_traffic(layout, shape, work, stages(layout, shape)[stage], together)}


def time(layout: ParallelLayout, shape: ModelShape, work: Workload) -> StepTime:
    return step_time(layout, shape, work, H200, ranks_together(from_node_start(layout, 8), is_moe=shape.is_moe))


def test_a_step_sends_the_bytes_that_are_counted_by_hand() -> None:
    shape = find_shape("Qwen3-30B-A3B")
    tokens = 64 * 4096
    stream = tokens * 2048 * 2
    sent = traffic("megatron:d2e2")
    # Dispatch and combine, forward and backward: a token stays only if all 8 experts are among the rank's 64.
    assert sent["ep"].bytes == pytest.approx(48 * 4 * (stream / 2) * (1 - math.comb(64, 8) / math.comb(128, 8)))
    # Reduce-scatter in float32, all-gather in bfloat16, half of each; each expert is on one rank only.
    dense = shape.n_parameters - 48 * 128 * shape.expert_parameters
    assert sent["dp"].bytes == pytest.approx(dense * 6 / 2)
    assert "edp" not in sent
    sent = traffic("megatron:t2", work=Workload(4096, 64, 8192, recompute="full"))
    # Around attention 2 forward, 2 again, 3 backward; embedding and head 4. The experts get tokens as they lie.
    assert sent["tp"].bytes == pytest.approx((48 * 7 + 4) * stream / 2)
    sent = traffic("megatron:p2")
    assert sent["pp"].bytes == stream
    assert traffic("megatron:d1") == {}


@pytest.mark.parametrize(("experts", "top_k", "ep"), [(8, 2, 2), (8, 3, 4), (6, 1, 3), (4, 4, 2)])
def test_a_token_travels_once_to_each_rank_with_some_of_its_experts(experts: int, top_k: int, ep: int) -> None:
    shape = replace(find_shape("Qwen3-30B-A3B"), n_experts=experts, top_k=top_k)
    layout = parse_backend(f"megatron:d{ep}e{ep}")
    together = ranks_together(from_node_start(layout, 8), is_moe=True)
    sent = {item.dimension: item for item in step_traffic(layout, shape, WORK, stages(layout, shape)[0], together)}
    ranks = [{expert * ep // experts for expert in chosen} for chosen in combinations(range(experts), top_k)]
    others = fmean(len(chosen - {0}) for chosen in ranks)
    assert sent["ep"].bytes == pytest.approx(48 * 4 * others * 64 * 4096 / ep * 2048 * 2)


def test_keys_and_values_travel_for_context_parallelism() -> None:
    shape = find_shape("Qwen3-8B")
    sent = traffic("megatron:c4", "Qwen3-8B")
    gathered = 64 * 4096 * 2 * (shape.key_width + shape.value_width)
    assert sent["cp"].bytes == pytest.approx(36 * 2 * gathered * 3 / 4)


def test_latents_travel_for_context_parallelism() -> None:
    tokens = 64 * 4096
    for backend in ("megatron:c4", "megatron:t2c4", "fsdp:c4", "fsdp:t2c4"):
        # Forward and, as gradients, backward; all heads share 512 + 64 channels.
        sent = traffic(backend, "DeepSeek-V3")["cp"].bytes
        assert sent == pytest.approx(61 * 2 * tokens * 2 * (512 + 64) * 3 / 4), backend


def test_latents_are_gathered_in_the_place_of_hidden_states() -> None:
    sent = traffic("megatron:t2", "DeepSeek-V3")
    # A token has latents of 1536 and 512 channels, and a key of 64. They are gathered twice, and their gradient once;
    # the output and its gradient are as wide as hidden states. The MLPs, of which 58 are shared experts, gather those.
    passes = 61 * (3 * (1536 + 512 + 64) / 7168 + 2) + 61 * 5 + 4
    assert sent["tp"].bytes == pytest.approx(passes * 64 * 4096 * 7168 * 2 / 2)


def test_links_decide_the_time() -> None:
    inside = Traffic("ep", 8, 8, 1e9, exchanges_pairs=True)
    across = Traffic("ep", 16, 8, 1e9, exchanges_pairs=True)
    ring = Traffic("dp", 16, 8, 1e9, exchanges_pairs=False)
    assert inside.seconds(H200) == pytest.approx(1e9 / 450e9 / 0.75)
    assert across.seconds(H200) == pytest.approx(1e9 * 8 / 15 / 50e9 / 0.75)
    # A ring over nodes is carried by all eight network cards of a node.
    assert ring.seconds(H200) == pytest.approx(1e9 / 400e9 / 0.75)


def test_the_bubble_is_that_of_the_schedule() -> None:
    shape = find_shape("Qwen3-8B")
    plain, interleaved = (time(parse_backend(backend), shape, WORK) for backend in ("megatron:p4", "megatron:p4v3"))
    assert plain.bubble == pytest.approx(plain.in_pipeline / plain.micro_batches * 3)
    assert interleaved.bubble == pytest.approx(interleaved.in_pipeline / interleaved.micro_batches)


def test_recomputation_and_small_micro_batches_cost_time() -> None:
    layout, shape = parse_backend("megatron:d8"), find_shape("Qwen3-8B")
    none, selective, full = (time(layout, shape, WORK.recomputing(mode)) for mode in ("none", "selective", "full"))
    assert none.recompute == 0 < selective.recompute < full.recompute < none.layers / 2
    assert none.flops.total == full.flops.total
    assert none.mfu > full.mfu
    tiny = time(layout, find_shape("Qwen3-0.6B"), Workload(256, 64, 256))
    assert tiny.launching > tiny.layers
