"""Host memory of a node, and the recipe that needs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.config.load import load_any_recipe
from fivefold.families.read import find_shape
from fivefold.planning.estimates import Estimate
from fivefold.planning.host_memory import PROCESS_BYTES
from fivefold.planning.plan import plan_recipe
from fivefold.report.plan.as_json import plan_as_json

RECIPE = Path(__file__).parents[3] / "recipes" / "qwen3-30b-a3b-2xh200.yaml"
MODEL = ["actor.path=Qwen3-30B-A3B"]


def planned(*overrides: str) -> Estimate:
    plan = plan_recipe(load_any_recipe(RECIPE, [*MODEL, *overrides]), gpu="h200-141g")
    assert plan.estimate is not None
    return plan.estimate


def needed(estimate: Estimate) -> int:
    return estimate.host_memory[0].total


def test_the_whole_model_fits_on_two_h200s_and_their_host() -> None:
    """Of 30.5 billion parameters, 6 bytes each are on the host: remainders and two moments."""
    estimate = planned()
    assert estimate.fits
    assert estimate.offloaded == ("grads",)
    assert needed(estimate) == pytest.approx(6 * find_shape("Qwen3-30B-A3B").n_parameters + 4 * PROCESS_BYTES, rel=1e-6)
    assert (
        "a node needs up to 199.2 GB of host memory, of the 274.9 GB of cluster.host_memory_gib: 16.0 GB of processes, "
        "183.2 GB of pinned weights and optimizer state"
    ) in estimate.notes
    assert any("the weights of actor stay on the devices, and the gradients" in note for note in estimate.notes)


def test_ray_keeps_a_twentieth_of_the_host() -> None:
    """It ends the processes of a node whose memory is fuller: 263.3 GB are more than 95 % of 256 GiB."""
    recipe = RECIPE.with_name("qwen3-30b-a3b-2xh100.yaml")
    offloaded = [*MODEL, "actor.offload.params=true", "rollout.memory_fraction=null"]
    for gib, fits in ((256, False), (258, False), (259, True)):
        keys = [*offloaded, f"cluster.host_memory_gib={gib}"]
        estimate = plan_recipe(load_any_recipe(recipe, keys), gpu="h100-80g").estimate
        assert estimate is not None
        assert estimate.fits is fits
        assert needed(estimate) == pytest.approx(263.3e9, rel=1e-3)
        assert fits or "(Ray lets them take 95% of it)" in estimate.problems[0]


def test_it_fits_only_with_small_state_on_the_host() -> None:
    state = "actor.megatron.optimizer."
    problems = planned(f"{state}state_on=device").problems
    assert any(line.startswith("actor: rank 0") for line in problems)
    float32 = [
        f"{state}store_param_remainders=false",
        *(f"{state}{m}_dtype=float32" for m in ("exp_avg", "exp_avg_sq")),
    ]
    (problem,) = planned(*float32).problems
    assert "node 0: its roles need 382.4 GB of host memory, of the 274.9 GB of cluster.host_memory_gib" in problem
    assert not planned(*float32, "cluster.host_memory_gib=null").problems


def test_checkpoints_are_copied_in_float32_where_there_is_room() -> None:
    n_parameters = find_shape("Qwen3-30B-A3B").n_parameters
    without = needed(planned("recover.mode=disabled"))
    waits = "training waits while a checkpoint is written, because no copy of its state is in host memory"
    by_itself, blocking = planned(), planned("recover.snapshot=blocking", "cluster.host_memory_gib=null")
    for estimate in (by_itself, blocking):
        assert estimate.fits
        assert not estimate.copies_state
        assert needed(estimate) == without
        assert waits in estimate.notes
    roomy = planned("cluster.host_memory_gib=null")
    memory = roomy.host_memory[0]
    assert roomy.copies_state
    assert memory.snapshots == pytest.approx(12 * n_parameters, rel=1e-6)
    assert memory.total == without + memory.snapshots
    assert waits not in roomy.notes
    assert any("366.4 GB of copies for checkpoints" in note for note in roomy.notes)
    plan = plan_recipe(load_any_recipe(RECIPE, [*MODEL, "cluster.host_memory_gib=null"]), gpu="h200-141g")
    [node] = plan_as_json(plan)["host_memory"]
    assert node == {"node": 0, **vars(memory), "total": memory.total}


def test_a_copy_that_is_asked_for_and_does_not_fit_is_a_problem() -> None:
    (problem,) = planned("recover.snapshot=copy").problems
    assert "node 0: its roles need 565.6 GB of host memory" in problem
    assert "366.4 GB of copies for checkpoints" in problem
    assert "write checkpoints without a copy (recover.snapshot=blocking)" in problem


def test_offloaded_weights_are_copied_to_the_host() -> None:
    kept, moved = planned(), planned("actor.offload.params=true")
    weights = sum(model.placed.layout.world_size * model.memory[0].weights for model in moved.models)
    assert needed(moved) - needed(kept) == weights
    assert moved.rollouts[0].others == kept.rollouts[0].others - moved.models[0].memory[0].weights


def test_cpu_processes_offload_nothing_by_themselves() -> None:
    assert planned("cluster.n_gpus_per_node=0", "rollout.backend=transformers:d2").offloaded == ()


def weights_by_node(estimate: Estimate) -> list[int]:
    return [memory.weights for _, memory in sorted(estimate.host_memory.items())]


def test_weights_that_a_rollout_takes_beside_the_training_are_counted_once_on_each_node() -> None:
    keys = ["actor.backend=megatron:d1", "rollout.backend=transformers:d1", "rollout.colocate=false"]
    ahead = [*keys, "rollout.max_head_offpolicyness=1"]
    with_copy, without = planned(*ahead), planned(*ahead, "rollout.overlap_weight_sync=false")
    n_bytes = 2 * find_shape("Qwen3-30B-A3B").n_parameters
    assert needed(with_copy) - needed(without) == n_bytes
    assert needed(without) == needed(planned(*keys)), "the engine copies each bucket to its device"
    assert any("61.1 GB of weights on their way to the rollout" in note for note in with_copy.notes)
    assert needed(planned(*ahead, "rollout.backend=vllm:d1")) == needed(without), "by NCCL, the trainer waits"
    by_nccl = planned(*ahead, "rollout.backend=vllm:d1", "rollout.overlap_weight_sync=true")
    assert needed(by_nccl) == needed(with_copy)
    [actor] = by_nccl.models
    [waiting] = planned(*ahead, "rollout.backend=vllm:d1").models
    assert actor.memory[0].buffers - waiting.memory[0].buffers == 2 * 2048 * 151936, "the largest tensor, on the device"
    nodes = ["cluster.n_nodes=2", "cluster.n_gpus_per_node=1"]
    assert weights_by_node(planned(*ahead, *nodes)) == [n_bytes, n_bytes]
    by_nccl = planned(*ahead, *nodes, "rollout.backend=vllm:d1", "rollout.overlap_weight_sync=true")
    assert sorted(weights_by_node(by_nccl)) == [0, n_bytes]


def test_files_from_which_servers_read_weights_are_in_host_memory() -> None:
    n_bytes = 2 * find_shape("Qwen3-30B-A3B").n_parameters
    shared = ["cluster.host_memory_gib=null", "rollout.weight_transport=folder"]
    assert weights_by_node(planned(*shared)) == [n_bytes], "once for all replicas of a node"
    assert weights_by_node(planned(*shared[:1])) == [0]
    (problem,) = planned(*shared[1:], "actor.offload.params=true").problems
    assert "61.1 GB of weights on their way to the rollout" in problem
    assert "rollout.weight_transport=ipc" in problem
    apart = ["actor.backend=megatron:d1", "rollout.backend=sglang:d1", "rollout.colocate=false", *shared]
    nodes = ["cluster.n_nodes=2", "cluster.n_gpus_per_node=1"]
    assert weights_by_node(planned(*apart)) == [n_bytes]
    assert sorted(weights_by_node(planned(*apart, *nodes))) == [0, n_bytes], "the trainer's node has none"
    ahead = planned(*apart, *nodes, "rollout.max_head_offpolicyness=1")
    assert weights_by_node(ahead) == [n_bytes, n_bytes]
