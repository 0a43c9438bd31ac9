"""Memory of ranks on FSDP, against sums that are written out here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fivefold.config.state_buckets import BUCKET_SIZE, SLOTS
from fivefold.families.read import find_shape
from fivefold.layout.parser import parse_backend
from fivefold.planning.fsdp_memory import fsdp_memory
from fivefold.planning.memory import RankMemory
from fivefold.planning.workload import StateBytes, Workload

QWEN3_8B = find_shape("Qwen3-8B")
WORK = Workload(4096, 64, 8192)


def memory_of(backend: str, model: str = "Qwen3-8B", **values: Any) -> RankMemory:
    return fsdp_memory(parse_backend(backend), find_shape(model), replace(WORK, **values))


@pytest.mark.parametrize("backend", ["fsdp:d8", "fsdp:d4c2", "fsdp:c8"])
def test_sixteen_bytes_a_parameter_are_sharded_over_replicas_and_parts_of_sequences(backend: str) -> None:
    memory = memory_of(backend)
    assert memory.resident == pytest.approx(16 * QWEN3_8B.n_parameters / 8, rel=1e-6)
    assert memory.snapshot == pytest.approx(12 * QWEN3_8B.n_parameters / 8, rel=1e-6)


def test_moments_are_smaller_in_bfloat16_and_may_be_in_host_memory() -> None:
    parameters = QWEN3_8B.n_parameters / 8
    small = memory_of("fsdp:d8", state=StateBytes(exp_avg=2, exp_avg_sq=2))
    assert small.resident == pytest.approx(12 * parameters, rel=1e-6)
    away = memory_of("fsdp:d8", state=StateBytes(on_host=True))
    assert (away.optimizer, away.host_optimizer) == (0, memory_of("fsdp:d8").optimizer)
    assert away.resident == pytest.approx(8 * parameters, rel=1e-6)


def test_the_root_units_gradient_is_summed_when_the_activations_are_gone() -> None:
    shape = QWEN3_8B
    root = 2 * shape.vocab * shape.hidden + shape.hidden
    memory = memory_of("fsdp:d8")
    assert memory.update == root * (2 + 4)
    assert memory.buffers >= root * 2
    # Three buckets of two moments in float32 go through the GPU, at another time.
    streamed = memory_of("fsdp:d8", "Qwen3-0.6B", state=StateBytes(on_host=True))
    assert streamed.update == max(SLOTS * BUCKET_SIZE * 8, memory_of("fsdp:d8", "Qwen3-0.6B").update)


def test_norms_alone_are_on_every_tensor_parallel_rank() -> None:
    shape = QWEN3_8B
    norms = shape.n_layers * (2 * shape.hidden + 2 * shape.head_dim) + shape.hidden
    assert memory_of("fsdp:d4t2").resident == pytest.approx(16 * (norms + (shape.n_parameters - norms) / 2) / 4)


def test_keeping_gathered_weights_takes_those_of_all_layers_instead_of_two() -> None:
    shape = QWEN3_8B
    layer = shape.mixer_parameters("full") + shape.dense_mlp_parameters + 2 * shape.hidden
    more = memory_of("fsdp:d8", kept_gathered=1.0).buffers - memory_of("fsdp:d8").buffers
    assert more == (shape.n_layers - 2) * layer * 2


def test_full_recomputation_keeps_the_input_of_each_layer() -> None:
    memory = memory_of("fsdp:d8", recompute="full")
    assert memory.activations == QWEN3_8B.n_layers * 8192 * QWEN3_8B.hidden * 2
    assert memory.activations < memory_of("fsdp:d8").activations / 20


def test_a_reference_is_sharded_in_its_own_dtype() -> None:
    layout = parse_backend("fsdp:d8")
    beside = fsdp_memory(layout, QWEN3_8B, WORK, reference=QWEN3_8B)
    assert beside.reference == pytest.approx(2 * QWEN3_8B.n_parameters / 8, rel=1e-6)
    assert fsdp_memory(layout, QWEN3_8B, WORK, is_trained=False).weights == beside.reference


def test_experts_are_gathered_with_their_layer() -> None:
    shape = find_shape("Qwen3-30B-A3B")
    layer = 2 * (shape.mixer_parameters("full") + shape.n_experts * shape.expert_parameters)
    assert memory_of("fsdp:d8", "Qwen3-30B-A3B").buffers > 2 * layer
