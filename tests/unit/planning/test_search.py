"""The search: only possible layouts, ranked by time, with reasons; where nothing fits, advice that holds."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from fivefold.families.read import find_shape
from fivefold.layout.gpus import GPUS, find_gpu
from fivefold.layout.parser import parse, parse_backend
from fivefold.planning.estimate import estimate
from fivefold.planning.groups import from_node_start, ranks_together
from fivefold.planning.inputs import Inputs
from fivefold.planning.layouts import layouts
from fivefold.planning.memory import training_memory
from fivefold.planning.model_estimate import trainer_memory
from fivefold.planning.plan import plan_model
from fivefold.planning.problems import HEADROOM
from fivefold.planning.room import Cluster
from fivefold.planning.search import reasons, search
from fivefold.planning.timing import step_time
from fivefold.planning.workload import Workload
from fivefold.rules.layouts import layout_problems
from tests.unit.planning.made_inputs import made_inputs

WORK = Workload(4096, 256, 8192)


@pytest.mark.parametrize(("name", "n_gpus"), [("Qwen3-8B", 8), ("Qwen3-30B-A3B", 16), ("Llama-3.1-70B", 24)])
def test_the_model_can_take_every_layout_that_is_tried(name: str, n_gpus: int) -> None:
    shape = find_shape(name)
    found = list(layouts(shape, Cluster.whole(find_gpu("h100"), n_gpus, 8), WORK))
    assert found
    assert len(set(found)) == len(found)
    for layout in found:
        assert list(layout_problems(layout, shape)) == []
        assert layout.world_size == n_gpus
        assert 8 % layout.tp == 0


def test_folded_layouts_and_pipelines_are_among_them() -> None:
    shape = find_shape("Qwen3-30B-A3B")
    sixteen = set(layouts(shape, Cluster.whole(find_gpu("h100"), 16, 8), WORK))
    assert parse_backend("megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)") in sixteen
    assert parse_backend("megatron:d1t2p4") in set(
        layouts(find_shape("Qwen3-8B"), Cluster.whole(find_gpu("h100"), 8, 8), WORK)
    )


def test_the_layouts_of_the_trainers_engine_are_tried() -> None:
    shape = find_shape("Qwen3-30B-A3B")
    cluster = replace(Cluster.whole(find_gpu("h200"), 8, 8), backend="fsdp")
    tried = {(layout.tp, layout.cp, layout.dp) for layout in layouts(shape, cluster, WORK)}
    # 4 key/value heads, and sequences of 4,096 tokens that context parallelism splits into parts of 512 at least.
    assert tried == {(tp, cp, 8 // tp // cp) for tp in (1, 2, 4) for cp in (1, 2, 4, 8) if tp * cp <= 8}
    found = search(shape, cluster, WORK)
    assert found.best[0].text.startswith("fsdp:")
    [needed] = trainer_memory(found.best[0].layout, shape, WORK.recomputing(found.best[0].recompute))
    assert needed == found.best[0].binding
    assert needed.total <= cluster.gpu.memory * (1 - HEADROOM)


def test_a_recipe_on_fsdp_is_searched_on_fsdp() -> None:
    plan = plan_model("Qwen3-8B", 8, actor="fsdp:d8", searching=True)
    assert plan.found is not None
    assert {candidate.layout.backend for candidate in plan.found.ranked} == {"fsdp"}
    assert plan.estimate is not None


def test_the_best_is_the_fastest_that_fits() -> None:
    shape, cluster = find_shape("Qwen3-8B"), Cluster.whole(find_gpu("h100"), 8, 8)
    found = search(shape, cluster, WORK, limit=3)
    assert len(found.best) == 3
    seconds = [candidate.time.total for candidate in found.best]
    assert seconds == sorted(seconds)
    room = cluster.gpu.memory * (1 - HEADROOM)
    fastest = min(
        step_time(
            layout, shape, WORK.recomputing(mode), cluster.gpu, ranks_together(from_node_start(layout, 8), is_moe=False)
        ).total
        for layout in layouts(shape, cluster, WORK)
        for mode in ("none", "selective", "full")
        if max(stage.total for stage in training_memory(layout, shape, WORK.recomputing(mode))) <= room
    )
    assert seconds[0] == pytest.approx(fastest)
    assert all(parse_backend(candidate.text) == candidate.layout for candidate in found.best)
    assert "to spare" in reasons(found.best[0], found.best[0])[0]
    assert any(reason.startswith("loses") for reason in reasons(found.best[2], found.best[0]))


def test_advice_holds_where_nothing_fits() -> None:
    shape, cluster = find_shape("Llama-3.1-70B"), Cluster.whole(find_gpu("h100"), 8, 8)
    found = search(shape, cluster, WORK)
    assert (found.best, found.n_fitting) == ((), 0)
    advice = "\n".join(found.advice)
    assert "the nearest is" in advice
    [more] = map(int, re.findall(r"fits on (\d+) GPUs", advice))
    assert search(shape, cluster.times(more // 8), WORK.recomputing("full")).best
    [listed] = re.findall(r"GPUs on which it fits: (.*)", advice)
    names = listed.split(", ")
    for gpu in GPUS.values():
        assert bool(search(shape, replace(cluster, gpu=gpu), WORK).best) == (gpu.name in names)


def test_shorter_micro_batches_are_advised_where_they_help() -> None:
    shape, cluster = find_shape("Qwen3-8B"), Cluster.whole(find_gpu("h100"), 2, 2)
    advice = "\n".join(search(shape, cluster, Workload(4096, 64, 131072)).advice)
    assert "GPUs of this kind" in advice


def test_models_that_are_not_trained_are_searched_over_uneven_stages() -> None:
    cluster = Cluster.whole(find_gpu("h200"), 256, 8)
    degrees = {layout.pp for layout in layouts(find_shape("DeepSeek-V3"), cluster, WORK)}
    assert {1, 2, 4, 8, 16, 32} <= degrees


def two_nodes(text: str, devices: dict[str, tuple[int, ...]] | None = None, **changes: Any) -> Inputs:
    return made_inputs(text, **{"n_nodes": 2, "work": WORK, "devices": devices, **changes})


@pytest.mark.parametrize("model", ["Qwen3-8B", "Qwen3-30B-A3B"])
@pytest.mark.parametrize(
    ("rollout", "devices"),
    [
        (2, None),
        (4, None),
        (6, None),
        (4, {"rollout": (0, 1, 2, 3), "actor": tuple(range(4, 16))}),
        (4, {"rollout": (0, 4, 8, 12), "actor": (1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15)}),
        (8, {"rollout": tuple(range(0, 16, 2)), "actor": (1, 9, 3, 11, 5, 13, 7, 15)}),
    ],
)
def test_the_ranking_has_the_times_of_the_plans(
    model: str, rollout: int, devices: dict[str, tuple[int, ...]] | None
) -> None:
    """That holds wherever the actor's GPUs begin, and whatever lies between them."""
    servers = f"sglang[rollout]:d{rollout}"
    n_gpus = 16 - rollout
    asked = two_nodes(f"{servers}+megatron[actor]:d{n_gpus}", devices, shape=find_shape(model))
    for candidate in search(asked.actor.shape, Cluster.of(asked), asked.actor.work, limit=8).best:
        chosen = parse(f"{servers}+{candidate.text.replace('megatron', 'megatron[actor]')}")
        actor = replace(asked.actor, work=asked.actor.work.recomputing(candidate.recompute))
        [planned] = estimate(replace(asked, allocation=chosen, models={"actor": actor})).models
        assert planned.time is not None
        assert planned.time.total == candidate.time.total
        inside = {spread.dimension for spread in planned.spreads if spread.n_inside == spread.n_groups}
        claims = [reason.split() for reason in reasons(candidate, candidate) if reason.endswith("inside nodes")]
        assert {word for claim in claims for word in claim} - {"and", "inside", "nodes"} <= inside


def test_tensor_parallel_groups_stay_on_the_nodes_that_there_are() -> None:
    ends = two_nodes("megatron[actor]:d6", {"actor": (5, 6, 7, 8, 9, 10)})
    assert {layout.tp for layout in layouts(find_shape("Qwen2.5-1.5B"), Cluster.of(ends), WORK)} == {1}
    pairs = two_nodes("megatron[actor]:d4", {"actor": (6, 7, 8, 9)})
    assert {layout.tp for layout in layouts(pairs.actor.shape, Cluster.of(pairs), WORK)} == {1, 2}


def test_layouts_divide_the_reference_in_the_same_processes_too() -> None:
    """The actor has 36 layers, the reference 28."""
    cluster, small = Cluster.whole(find_gpu("h100"), 36, 4), find_shape("Qwen3-0.6B")
    shape = find_shape("Qwen3-8B")
    assert 9 in {layout.pp for layout in layouts(shape, cluster, WORK)}
    assert {layout.pp for layout in layouts(shape, cluster, WORK, reference=small)} == {1, 2, 3, 4, 6, 9, 12, 18}


@pytest.mark.parametrize(
    ("engine", "length", "fraction"),
    [
        ("transformers", 65536, None),
        ("transformers", 16384, None),
        ("vllm", 65536, None),
        ("sglang", 16384, None),
        ("vllm", 16384, 0.5),
        ("sglang", 16384, 0.3),
    ],
)
def test_advice_on_gpus_holds_next_to_an_engine(engine: str, length: int, fraction: float | None) -> None:
    asked = two_nodes(
        f"{engine}[rollout]:d2|megatron[actor]:d2",
        shape=find_shape("Qwen3-8B"),
        gpu=find_gpu("a100-40g"),
        n_nodes=1,
        work=Workload(length, 256, 32768, "full"),
        batch=16,
        memory_fraction=fraction,
    )
    found = search(asked.actor.shape, Cluster.of(asked), asked.actor.work)
    assert found.best == ()
    assert all("-" not in line.split("may keep ")[1] for line in found.advice if "may keep" in line)
    named = {name for line in found.advice if "on which it fits" in line for name in line.split(": ")[1].split(", ")}
    for gpu in GPUS.values():
        there = replace(asked, gpu=gpu)
        assert bool(search(there.actor.shape, Cluster.of(there), there.actor.work).best) == (gpu.name in named)
