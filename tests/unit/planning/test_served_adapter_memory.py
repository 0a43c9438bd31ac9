"""Memory of adapters next to a server's weights: room on its GPUs, files, and weights that wait on the host."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fivefold.config.load import load_recipe
from fivefold.config.schema.lora import LoraConfig
from fivefold.config.schema.train import TrainRecipe
from fivefold.families.read import find_shape
from fivefold.families.served import room_elements
from fivefold.layout.backends import BACKENDS
from fivefold.planning.estimate import estimate
from fivefold.planning.estimates import Estimate
from fivefold.planning.recipe_inputs import Changes, recipe_inputs

RECIPE = Path(__file__).resolve().parents[3] / "recipes/qwen3-30b-a3b-lora-1xh100.yaml"
SERVED = "rollout.weight_transport=served_adapter"
# Qwen3-30B-A3B: 48 layers of hidden size 2048, 32 query and 4 key and value heads of 128, 128 experts of 768.
ATTENTION = 48 * (2048 + 4096 + 2 * (2048 + 512) + 4096 + 2048)
EXPERTS = 48 * 128 * 3 * (2048 + 768)


def planned(*keys: str) -> Estimate:
    recipe = load_recipe(RECIPE, ["cluster.host_memory_gib=null", *keys], TrainRecipe)
    return estimate(recipe_inputs(recipe, "h200", Changes()))


def test_a_server_makes_room_of_one_rank_for_adapters_of_all_layers() -> None:
    """Its experts get as much as its attention, though their adapters have the rank 4."""
    merged, served = planned(), planned(SERVED)
    [without], [rollout] = merged.rollouts, served.rollouts
    assert rollout.memory.weights - without.memory.weights == 2 * 32 * (ATTENTION + EXPERTS)
    [rollout] = planned(SERVED, "actor.lora.rank=33", "actor.lora.experts=none").rollouts
    assert rollout.memory.weights - without.memory.weights == 2 * 64 * ATTENTION, "vLLM has room for 64"
    [rollout] = planned(SERVED, "actor.lora.rank=33", "actor.lora.experts=none", "rollout.backend=sglang:d1").rollouts
    assert rollout.memory.weights - without.memory.weights == 2 * 33 * ATTENTION


def test_weights_that_nobody_sends_wait_in_host_memory_while_the_server_sleeps() -> None:
    merged, served = (planned("actor.offload.params=true", *keys) for keys in ([], [SERVED]))
    [rollout] = served.rollouts
    files = 2 * (32 * ATTENTION + 4 * EXPERTS)
    [before], [after] = merged.host_memory.values(), served.host_memory.values()
    assert after.state - before.state == rollout.memory.weights
    assert (before.weights, after.weights) == (0, files)
    [of_sglang] = planned(SERVED, "rollout.backend=sglang:d1", "actor.lora.experts=none").host_memory.values()
    assert of_sglang.weights == 2 * 32 * ATTENTION


def test_a_server_apart_keeps_nothing_on_the_host() -> None:
    apart = ["cluster.n_gpus_per_node=2", "rollout.colocate=false", "actor.megatron.recompute=full"]
    merged, served = planned(*apart, "rollout.weight_transport=adapter"), planned(*apart, SERVED)
    [before], [after] = merged.host_memory.values(), served.host_memory.values()
    assert before.state == after.state
    assert before.weights == 2 * find_shape("Qwen3-30B-A3B").n_parameters, "the merged weights are files"
    assert after.weights == 2 * (32 * ATTENTION + 4 * EXPERTS)


def test_sglang_keeps_the_room_while_it_sleeps() -> None:
    asleep = {}
    for backend in ("vllm", "sglang"):
        found = planned(SERVED, f"rollout.backend={backend}:d1")
        [actor] = found.models
        asleep[backend] = actor.others - BACKENDS[backend].asleep_bytes
    assert asleep == {"vllm": 0, "sglang": 2 * 32 * (ATTENTION + EXPERTS)}


@pytest.mark.parametrize("ranks", [1, 2])
def test_tensor_parallelism_cuts_one_matrix_of_each_adapter(ranks: int) -> None:
    shape = find_shape("Qwen3-30B-A3B").with_lora(LoraConfig(rank=1, experts="none"))
    q, kv, o = 2048 + 4096 // ranks, 2 * (2048 + 512 // ranks), 4096 // ranks + 2048
    assert room_elements(shape, 3, ranks) == 3 * 48 * (q + kv + o)
    alone = replace(shape, adapters=replace(shape.adapters, targets=("v_proj",)))  # type: ignore[type-var]
    assert room_elements(alone, 1, ranks) == 48 * (q + kv), "with those that it computes in one"
