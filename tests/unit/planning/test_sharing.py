"""Roles that take turns on the same devices: what each keeps there while the others work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fivefold.config.schema.role import OFFLOADABLE
from fivefold.families.read import find_shape
from fivefold.layout.allocation import Allocation
from fivefold.layout.gpus import find_gpu
from fivefold.layout.parser import parse
from fivefold.planning.estimate import estimate
from fivefold.planning.inputs import Inputs, Leaves
from fivefold.planning.memory import CUDA_CONTEXT
from fivefold.planning.rollout_memory import asleep_bytes
from fivefold.planning.room import Cluster
from fivefold.planning.search import Candidate, search
from fivefold.planning.workload import Workload
from tests.unit.planning.made_inputs import WORK, frozen, made_inputs

ALL_LEAVE: Leaves = dict.fromkeys(OFFLOADABLE, True)


def with_work(inputs: Inputs, allocation: Allocation, work: Workload) -> Inputs:
    models = {**inputs.models, "actor": replace(inputs.actor, work=work)}
    return replace(inputs, allocation=allocation, models=models)


def test_a_sleeping_engine_keeps_its_context() -> None:
    alone = estimate(made_inputs("megatron[actor]:d8")).models[0]
    sharing = estimate(made_inputs("transformers[rollout]:d8|megatron[actor]:d8")).models[0]
    assert (alone.others, sharing.others) == (0, CUDA_CONTEXT)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_sleeping_server_keeps_what_was_measured(engine: str) -> None:
    [trainer] = estimate(made_inputs(f"{engine}[rollout]:d4t2|megatron[actor]:d8")).models
    assert 3.4e9 <= trainer.others <= 4.6e9


def test_a_waiting_trainer_keeps_its_state() -> None:
    found = estimate(made_inputs("vllm[rollout]:d4t2|megatron[actor]:d4t2"))
    trainer, rollout = found.models[0], found.rollouts[0]
    assert rollout.others == trainer.binding.resident + trainer.binding.context
    assert any("rollout and actor take turns" in note for note in found.notes)


def test_a_reference_of_its_own_stays_beside_the_actor() -> None:
    text = "vllm[rollout]:d2+megatron[actor]:d4|megatron[ref]:d4"
    found = estimate(
        made_inputs(
            text, others={"ref": frozen(find_shape("Qwen3-8B"), offload=False)}, work=Workload(4096, 256, 8192, "full")
        )
    )
    actor, ref = found.models
    assert actor.binding.reference == 0
    assert actor.others == ref.binding.weights + ref.binding.context
    assert ref.others == actor.binding.resident + actor.binding.context
    assert any("ref and actor take turns" in note for note in found.notes)


def test_the_note_of_a_shared_device_names_what_each_role_keeps_there() -> None:
    text = "vllm[rollout]:d2t4|megatron[actor]:d8|megatron[ref]:d8"
    notes = estimate(
        made_inputs(text, others={"ref": frozen(find_shape("Qwen3-8B"), offload=False)}, leaves=ALL_LEAVE)
    ).notes
    [note] = [note for note in notes if note.startswith("rollout and actor and ref take turns")]
    assert "the weights of ref stay on the devices" in note
    assert "the weights and gradients and optimizer state of actor are offloaded" in note


def test_a_reward_model_works_while_the_actor_waits_for_the_rollout() -> None:
    shape = find_shape("Qwen3-8B")
    text = "vllm[rollout]:d2t4|megatron[actor]:d8|megatron[reward]:d8"
    scorer = {"reward": frozen(shape.as_reward_model())}
    found = estimate(made_inputs(text, others=scorer, leaves=ALL_LEAVE))
    actor, reward = found.models
    assert reward.others == asleep_bytes(found.rollouts[0].placed.layout) + actor.binding.context


def test_the_advice_for_a_role_that_does_not_fit_is_about_that_role() -> None:
    large, small = find_shape("Llama-3.1-70B"), find_shape("Qwen3-0.6B")
    teacher = {"teacher": frozen(large)}
    [alone] = estimate(made_inputs("megatron[actor]:d4+megatron[teacher]:d4", shape=small, others=teacher)).problems
    assert alone.endswith("its weights alone are too large: split the model further (p, t)")
    problems = estimate(made_inputs("vllm[rollout]:d8|megatron[actor]:d1t8", shape=large)).problems
    rollout = next(line for line in problems if line.startswith("rollout:"))
    assert rollout.endswith("split replicas further (t), or give roles separate devices")
    text = "megatron[actor]:d8|megatron[ref]:d8t1"
    crowded = estimate(
        made_inputs(
            text, others={"ref": frozen(find_shape("Qwen3-14B"), offload=False)}, work=Workload(4096, 256, 8192, "full")
        )
    )
    ref = next(line for line in crowded.problems if line.startswith("ref:"))
    assert "the other roles leave it too little" in ref
    scorer = {"reward": frozen(small.as_reward_model(), Workload(4096, 4096, 2**23))}
    [long] = estimate(made_inputs("megatron[actor]:d4+megatron[reward]:d4", shape=small, others=scorer)).problems
    assert "lower reward.model.mb_spec.max_tokens_per_mb, or split further (c, t, p)" in long


def test_the_reference_may_be_another_model() -> None:
    small = find_shape("Qwen3-0.6B")
    inside = estimate(made_inputs("megatron[actor]:d8", others={"ref": frozen(small, offload=False)})).models[0]
    assert inside.binding.reference == 2 * small.n_parameters
    apart = estimate(
        made_inputs("megatron[actor]:d4+megatron[ref]:d4", others={"ref": frozen(small, offload=False)})
    ).models[1]
    assert apart.binding.weights == 2 * small.n_parameters


@pytest.mark.parametrize("backend", ["vllm", "transformers"])
def test_the_search_leaves_room_for_the_engine(backend: str) -> None:
    """The layout that is fastest without regard to the engine leaves no memory to generate a sequence."""
    text = f"{backend}[rollout]:d8|megatron[actor]:d*"
    tight = made_inputs(text, shape=find_shape("Qwen3-14B"), batch=8)
    cluster = Cluster.of(tight)
    assert cluster.most_kept is not None
    best = search(tight.actor.shape, cluster, tight.actor.work).best[0]
    kept = best.binding.resident + best.binding.context
    assert kept <= cluster.most_kept
    greedy = search(tight.actor.shape, replace(cluster, engines=()), tight.actor.work)
    assert greedy.n_fitting > search(tight.actor.shape, cluster, tight.actor.work).n_fitting
    chosen = parse(f"{backend}[rollout]:d8|" + best.text.replace("megatron", "megatron[actor]"))
    work = tight.actor.work.recomputing(best.recompute)
    assert estimate(with_work(tight, chosen, work)).problems == ()


@pytest.mark.parametrize("offload", [None, False])
def test_the_search_counts_of_other_roles_what_the_plan_counts(offload: bool | None) -> None:
    shape = find_shape("Qwen3-8B")
    others = {
        "ref": frozen(shape, offload=offload is None),
        "teacher": frozen(shape, offload=offload),
        "reward": frozen(shape.as_reward_model(), offload=offload),
    }
    text = "vllm[rollout]:d4t2|megatron[actor]:d4t2|megatron[ref]:d8|megatron[teacher]:d8|megatron[reward]:d8"
    asked = made_inputs(text, others=others, leaves=ALL_LEAVE)
    found, cluster = estimate(asked), Cluster.of(asked)
    actor = found.models[0]
    assert cluster.reserved == actor.others
    assert cluster.engines[0].others == found.rollouts[0].others - actor.binding.context


@pytest.mark.parametrize(("n_bytes", "is_offloaded"), [(None, False), (4, False), (None, True)])
def test_the_search_counts_of_a_reference_what_the_plan_counts(n_bytes: int | None, is_offloaded: bool) -> None:
    shape = find_shape("Qwen3-8B")
    work = WORK if n_bytes is None else replace(WORK, element_bytes=n_bytes)
    asked = made_inputs("megatron[actor]:d8", others={"ref": frozen(shape, work, offload=is_offloaded)})
    [planned] = estimate(asked).models[0].memory
    layout = asked.place()["actor"].layout
    [searched] = Cluster.of(asked).memory(layout, shape, asked.actor.work, shape)
    assert (searched.reference, searched.total) == (planned.reference, planned.total)


def test_a_search_that_finds_nothing_advises_devices_for_the_other_roles() -> None:
    full = made_inputs("vllm[rollout]:d8|megatron[actor]:d*", shape=find_shape("Qwen3-32B"))
    found = search(full.actor.shape, Cluster.of(full), full.actor.work)
    assert found.best == ()
    assert any("with other devices for those roles, it fits on" in line for line in found.advice)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("fraction", [0.3, 0.55])
def test_a_server_takes_the_fraction_that_it_is_given(engine: str, fraction: float) -> None:
    whole = find_gpu("h100").memory
    for sign in "+|":
        asked = made_inputs(f"{engine}[rollout]:d2t2{sign}megatron[actor]:d2t2", memory_fraction=fraction)
        assert estimate(asked).rollouts[0].memory.total == int(fraction * whole)
    left = estimate(made_inputs(f"{engine}[rollout]:d2t2|megatron[actor]:d2t2")).rollouts[0]
    share = {"vllm": 0.9, "sglang": 0.88}[engine]
    assert left.memory.total + left.others == pytest.approx(share * whole, abs=1)


@pytest.mark.parametrize(("fraction", "problem"), [(0.9, "a rank needs 76.4 GB"), (0.2, "leave no room for")])
def test_a_fraction_that_is_too_large_or_too_small_is_a_problem(fraction: float, problem: str) -> None:
    """The GPU has 84.9 GB. The server's weights are 16.4 GB, and the trainer keeps its own on the same GPU."""
    asked = made_inputs("vllm[rollout]:d8|megatron[actor]:d2p4", memory_fraction=fraction)
    assert [line for line in estimate(asked).problems if line.startswith("rollout: ") and problem in line]


@pytest.mark.parametrize(("fraction", "is_found"), [(0.1, False), (0.25, True), (0.7, True), (0.8, False)])
def test_the_search_finds_the_layouts_that_fit_with_a_server_of_that_fraction(fraction: float, is_found: bool) -> None:
    asked = made_inputs("vllm[rollout]:d8|megatron[actor]:d*", memory_fraction=fraction)

    def fits(candidate: Candidate) -> bool:
        chosen = parse("vllm[rollout]:d8|" + candidate.text.replace("megatron", "megatron[actor]"))
        work = asked.actor.work.recomputing(candidate.recompute)
        return estimate(with_work(asked, chosen, work)).fits

    cluster = Cluster.of(asked)
    without_server = search(asked.actor.shape, replace(cluster, engines=()), asked.actor.work, limit=1000).best
    expected = {candidate.text for candidate in without_server if fits(candidate)}
    assert {
        candidate.text for candidate in search(asked.actor.shape, cluster, asked.actor.work, limit=1000).best
    } == expected
    assert bool(expected) == is_found


@pytest.mark.parametrize("layout", ["megatron[actor]:d8", "fsdp[actor]:d8"])
def test_larger_micro_batches_without_gradients_take_memory_where_they_exceed_activations(layout: str) -> None:
    def temporaries(**work: Any) -> int:
        [trainer] = estimate(made_inputs(layout, work=Workload(4096, 256, 8192, **work))).models
        return trainer.memory[0].allocated

    plain = temporaries(recompute="full")
    assert temporaries(recompute="full", infer_tokens=8192) == plain
    assert temporaries(recompute="none", infer_tokens=16384) == temporaries(recompute="none")
    more = temporaries(recompute="full", infer_tokens=8 * 65536) - plain
    assert temporaries(recompute="full", infer_tokens=16 * 65536) - plain > 2 * more > 0
