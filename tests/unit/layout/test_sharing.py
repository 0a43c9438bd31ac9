"""Roles that take turns on the same devices: what each keeps there while the others work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fivefold.layout.allocation import parse
from fivefold.layout.blueprint import draw_up
from fivefold.layout.gpus import find_gpu
from fivefold.layout.memory import CUDA_CONTEXT
from fivefold.layout.plan_shape import find_shape
from fivefold.layout.question import Question
from fivefold.layout.search import Cluster, search
from fivefold.layout.workload import Workload


def question(text: str, **changes: Any) -> Question:
    values: dict[str, Any] = {
        "shape": find_shape("Qwen3-8B"),
        "gpu": find_gpu("h100"),
        "allocation": parse(text),
        "n_nodes": 1,
        "gpus_per_node": 8,
        "work": Workload(4096, 256, 8192),
        "generation_batch": 64,
        "generated": 256,
    }
    return Question(**{**values, **changes})


def test_a_sleeping_engine_keeps_its_context() -> None:
    alone = draw_up(question("megatron[actor]:d8")).trainers[0]
    sharing = draw_up(question("transformers[rollout]:d8|megatron[actor]:d8")).trainers[0]
    assert (alone.beside, sharing.beside) == (0, CUDA_CONTEXT)


def test_a_waiting_trainer_keeps_its_state() -> None:
    blueprint = draw_up(question("vllm[rollout]:d4t2|megatron[actor]:d4t2"))
    trainer, rollout = blueprint.trainers[0], blueprint.rollouts[0]
    assert rollout.beside == trainer.binding.resident + trainer.binding.context
    assert any("rollout and actor take turns" in note for note in blueprint.notes)


def test_a_reference_of_its_own_stays_beside_the_actor() -> None:
    text = "vllm[rollout]:d2+megatron[actor]:d4|megatron[ref]:d4"
    blueprint = draw_up(question(text, reference=find_shape("Qwen3-8B"), work=Workload(4096, 256, 8192, "full")))
    actor, ref = blueprint.trainers
    assert actor.binding.reference == 0
    assert actor.beside == ref.binding.weights + ref.binding.context
    assert ref.beside == actor.binding.resident + actor.binding.context
    assert any("ref and actor take turns" in note for note in blueprint.notes)


def test_the_reference_may_be_another_model() -> None:
    small = find_shape("Qwen3-0.6B")
    inside = draw_up(question("megatron[actor]:d8", reference=small)).trainers[0]
    assert inside.binding.reference == 2 * small.n_parameters
    apart = draw_up(question("megatron[actor]:d4+megatron[ref]:d4", reference=small)).trainers[1]
    assert apart.binding.weights == 2 * small.n_parameters


@pytest.mark.parametrize("backend", ["vllm", "transformers"])
def test_the_search_leaves_room_for_the_engine(backend: str) -> None:
    """Without a look at the engine the fastest layout keeps so much that no sequence can be generated beside it."""
    text = f"{backend}[rollout]:d8|megatron[actor]:d*"
    tight = question(text, shape=find_shape("Qwen3-14B"), generation_batch=8)
    cluster = Cluster.of(tight)
    assert cluster.most_kept is not None
    best = search(tight.shape, cluster, tight.work).best[0]
    kept = best.binding.resident + best.binding.context
    assert kept <= cluster.most_kept
    greedy = search(tight.shape, replace(cluster, engines=()), tight.work)
    assert greedy.n_fitting > search(tight.shape, cluster, tight.work).n_fitting
    chosen = parse(f"{backend}[rollout]:d8|" + best.text.replace("megatron", "megatron[actor]"))
    work = tight.work.recomputing(best.recompute)
    assert draw_up(replace(tight, allocation=chosen, work=work)).problems == ()


def test_a_search_that_finds_nothing_names_the_roles_beside() -> None:
    full = question("vllm[rollout]:d8|megatron[actor]:d*", shape=find_shape("Qwen3-32B"))
    found = search(full.shape, Cluster.of(full), full.work)
    assert found.best == ()
    assert any("with other devices for those roles, it fits on" in line for line in found.advice)
