"""Roles that take turns on the same devices: what each keeps there while the others work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fivefold.families.read import find_shape
from fivefold.layout.gpus import find_gpu
from fivefold.layout.parser import parse
from fivefold.planning.blueprint import draw_up
from fivefold.planning.memory import CUDA_CONTEXT
from fivefold.planning.offload_choice import OffloadChoice
from fivefold.planning.question import FrozenQuestion, Question
from fivefold.planning.rollout_memory import asleep_bytes
from fivefold.planning.search import Candidate, Cluster, search
from fivefold.planning.workload import Workload


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


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_sleeping_server_keeps_what_was_measured(engine: str) -> None:
    [trainer] = draw_up(question(f"{engine}[rollout]:d4t2|megatron[actor]:d8")).trainers
    assert 3.4e9 <= trainer.beside <= 4.6e9


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


def test_the_note_of_a_shared_device_names_what_each_role_keeps_there() -> None:
    text = "vllm[rollout]:d2t4|megatron[actor]:d8|megatron[ref]:d8"
    notes = draw_up(question(text, reference=find_shape("Qwen3-8B"), offload=OffloadChoice(True, True, True))).notes
    [note] = [note for note in notes if note.startswith("rollout and actor and ref take turns")]
    assert "the weights of ref stay on the devices" in note
    assert "the weights and gradients and optimizer state of actor are offloaded" in note


def test_a_reward_model_works_while_the_actor_waits_for_the_rollout() -> None:
    shape = find_shape("Qwen3-8B")
    text = "vllm[rollout]:d2t4|megatron[actor]:d8|megatron[reward]:d8"
    frozen = {"reward": FrozenQuestion(shape.as_reward_model(), Workload(4096, 256, 8192), offload=None)}
    blueprint = draw_up(question(text, frozen=frozen, offload=OffloadChoice(True, True, True)))
    actor, reward = blueprint.trainers
    assert reward.beside == asleep_bytes(blueprint.rollouts[0].placed.layout) + actor.binding.context


def test_the_advice_for_a_role_that_does_not_fit_is_about_that_role() -> None:
    large, small = find_shape("Llama-3.1-70B"), find_shape("Qwen3-0.6B")
    frozen = {"teacher": FrozenQuestion(large, Workload(4096, 256, 8192), offload=None)}
    [alone] = draw_up(question("megatron[actor]:d4+megatron[teacher]:d4", shape=small, frozen=frozen)).problems
    assert alone.endswith("its weights alone are too large: split the model further (p, t)")
    problems = draw_up(question("vllm[rollout]:d8|megatron[actor]:d1t8", shape=large)).problems
    rollout = next(line for line in problems if line.startswith("rollout:"))
    assert rollout.endswith("split replicas further (t), or give roles devices of their own")
    text = "megatron[actor]:d8|megatron[ref]:d8t1"
    crowded = draw_up(question(text, reference=find_shape("Qwen3-14B"), work=Workload(4096, 256, 8192, "full")))
    ref = next(line for line in crowded.problems if line.startswith("ref:"))
    assert "the other roles leave it too little" in ref
    frozen = {"reward": FrozenQuestion(small.as_reward_model(), Workload(4096, 4096, 2**23), offload=None)}
    [long] = draw_up(question("megatron[actor]:d4+megatron[reward]:d4", shape=small, frozen=frozen)).problems
    assert "lower reward.model.mb_spec.max_tokens_per_mb, or split further (c, t, p)" in long


def test_the_reference_may_be_another_model() -> None:
    small = find_shape("Qwen3-0.6B")
    inside = draw_up(question("megatron[actor]:d8", reference=small)).trainers[0]
    assert inside.binding.reference == 2 * small.n_parameters
    apart = draw_up(question("megatron[actor]:d4+megatron[ref]:d4", reference=small)).trainers[1]
    assert apart.binding.weights == 2 * small.n_parameters


@pytest.mark.parametrize("backend", ["vllm", "transformers"])
def test_the_search_leaves_room_for_the_engine(backend: str) -> None:
    """The layout that is fastest without regard to the engine leaves no memory to generate a sequence."""
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


@pytest.mark.parametrize("offload", [None, False])
def test_the_search_counts_of_other_roles_what_the_plan_counts(offload: bool | None) -> None:
    shape = find_shape("Qwen3-8B")
    frozen = {
        "teacher": FrozenQuestion(shape, Workload(4096, 256, 8192), offload),
        "reward": FrozenQuestion(shape.as_reward_model(), Workload(4096, 256, 8192), offload),
    }
    text = "vllm[rollout]:d4t2|megatron[actor]:d4t2|megatron[ref]:d8|megatron[teacher]:d8|megatron[reward]:d8"
    asked = question(
        text,
        frozen=frozen,
        reference=shape,
        reference_is_offloaded=offload is None,
        offload=OffloadChoice(True, True, True),
    )
    blueprint, cluster = draw_up(asked), Cluster.of(asked)
    actor = blueprint.trainers[0]
    assert cluster.reserved == actor.beside
    assert cluster.engines[0].beside == blueprint.rollouts[0].beside - actor.binding.context


@pytest.mark.parametrize(("n_bytes", "is_offloaded"), [(None, False), (4, False), (None, True)])
def test_the_search_counts_of_a_reference_what_the_plan_counts(n_bytes: int | None, is_offloaded: bool) -> None:
    shape = find_shape("Qwen3-8B")
    asked = question(
        "megatron[actor]:d8", reference=shape, reference_bytes=n_bytes, reference_is_offloaded=is_offloaded
    )
    [planned] = draw_up(asked).trainers[0].memory
    layout = asked.place()["actor"].layout
    [searched] = Cluster.of(asked).memory(layout, shape, asked.work, shape)
    assert (searched.reference, searched.total) == (planned.reference, planned.total)


def test_a_search_that_finds_nothing_advises_devices_for_the_other_roles() -> None:
    full = question("vllm[rollout]:d8|megatron[actor]:d*", shape=find_shape("Qwen3-32B"))
    found = search(full.shape, Cluster.of(full), full.work)
    assert found.best == ()
    assert any("with other devices for those roles, it fits on" in line for line in found.advice)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("fraction", [0.3, 0.55])
def test_a_server_takes_the_fraction_that_it_is_given(engine: str, fraction: float) -> None:
    whole = find_gpu("h100").memory
    for sign in "+|":
        asked = question(f"{engine}[rollout]:d2t2{sign}megatron[actor]:d2t2", memory_fraction=fraction)
        assert draw_up(asked).rollouts[0].memory.total == int(fraction * whole)
    left = draw_up(question(f"{engine}[rollout]:d2t2|megatron[actor]:d2t2")).rollouts[0]
    share = {"vllm": 0.9, "sglang": 0.88}[engine]
    assert left.memory.total + left.beside == pytest.approx(share * whole, abs=1)


@pytest.mark.parametrize(("fraction", "problem"), [(0.9, "a rank needs 76.4 GB"), (0.2, "leave no room for")])
def test_a_fraction_that_is_too_large_or_too_small_is_a_problem(fraction: float, problem: str) -> None:
    """The GPU has 84.9 GB. The server's weights are 16.4 GB, and the trainer keeps its own on the same GPU."""
    asked = question("vllm[rollout]:d8|megatron[actor]:d2p4", memory_fraction=fraction)
    assert [line for line in draw_up(asked).problems if line.startswith("rollout: ") and problem in line]


@pytest.mark.parametrize(("fraction", "is_found"), [(0.1, False), (0.25, True), (0.7, True), (0.8, False)])
def test_the_search_finds_the_layouts_that_fit_with_a_server_of_that_fraction(fraction: float, is_found: bool) -> None:
    asked = question("vllm[rollout]:d8|megatron[actor]:d*", memory_fraction=fraction)

    def fits(candidate: Candidate) -> bool:
        chosen = parse("vllm[rollout]:d8|" + candidate.text.replace("megatron", "megatron[actor]"))
        work = asked.work.recomputing(candidate.recompute)
        return draw_up(replace(asked, allocation=chosen, work=work)).fits

    cluster = Cluster.of(asked)
    without_server = search(asked.shape, replace(cluster, engines=()), asked.work, limit=1000).best
    expected = {candidate.text for candidate in without_server if fits(candidate)}
    assert {candidate.text for candidate in search(asked.shape, cluster, asked.work, limit=1000).best} == expected
    assert bool(expected) == is_found


@pytest.mark.parametrize("layout", ["megatron[actor]:d8", "fsdp[actor]:d8"])
def test_larger_micro_batches_without_gradients_take_memory_where_they_exceed_activations(layout: str) -> None:
    def temporaries(**work: Any) -> int:
        [trainer] = draw_up(question(layout, work=Workload(4096, 256, 8192, **work))).trainers
        return trainer.memory[0].allocated

    plain = temporaries(recompute="full")
    assert temporaries(recompute="full", infer_tokens=8192) == plain
    assert temporaries(recompute="none", infer_tokens=16384) == temporaries(recompute="none")
    more = temporaries(recompute="full", infer_tokens=8 * 65536) - plain
    assert temporaries(recompute="full", infer_tokens=16 * 65536) - plain > 2 * more > 0
