"""The devices of roles: from recipes, from allocations, and from lists."""

from __future__ import annotations

from typing import Any

import pytest

from fivefold.config.problems import RecipeError
from fivefold.config.schema.preferences import DPORecipe
from fivefold.config.schema.sft import SFTRecipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.layout.devices import parse_devices
from fivefold.layout.parser import parse, parse_role
from fivefold.layout.placement import Device, Placement, place, place_allocation, place_by_list


def recipe(
    actor: str | None = None,
    rollout: str | None = None,
    gpus: int = 8,
    nodes: int = 1,
    colocate: bool | None = None,
    kl_ctl: float = 0.0,
    **changes: Any,
) -> TrainRecipe:
    return TrainRecipe.model_validate(
        {
            "experiment_name": "place",
            "cluster": {"n_nodes": nodes, "n_gpus_per_node": gpus},
            "train_dataset": {"path": "d"},
            **changes,
            "actor": {
                "path": "m",
                "kl_ctl": kl_ctl,
                "advantage": "gae" if "critic" in changes else "grpo",
                **({} if actor is None else {"backend": actor}),
            },
            "rollout": {"colocate": colocate, **({} if rollout is None else {"backend": rollout})},
        }
    )


def indices(placement: Placement, role: str) -> list[int]:
    return [device.node * placement.n_devices_per_node + device.local for device in placement[role].devices]


def test_roles_share_devices_only_if_there_are_too_few() -> None:
    apart = place(recipe("megatron:d4", "vllm:d2t2"))
    assert indices(apart, "rollout") == [0, 1, 2, 3]
    assert indices(apart, "actor") == [4, 5, 6, 7]
    assert apart.sharers("actor") == ()
    assert apart.warnings() == ()
    shared = place(recipe("megatron:d4t2", "vllm:d8"))
    assert indices(shared, "rollout") == indices(shared, "actor") == list(range(8))
    assert shared.sharers("actor") == ("rollout",)


def test_colocate_decides_whether_roles_share_devices() -> None:
    placement = place(recipe("megatron:d4", "vllm:d4", colocate=True))
    assert indices(placement, "rollout") == indices(placement, "actor") == [0, 1, 2, 3]
    assert placement.warnings() == ("4 of 8 GPUs are unused: node 0: 4-7",)
    with pytest.raises(RecipeError, match=r"8 \(rollout\) \+ 8 \(actor\) = 16 GPUs, but the cluster has 1 \* 8 = 8"):
        place(recipe("megatron:d8", "vllm:d8", colocate=False))


def listed(**mappings: Any) -> TrainRecipe:
    """Backends of four devices each, put on lists."""
    sections = {"actor": {"path": "m", "backend": "megatron:d2t2"}, "rollout": {"backend": "vllm:d*"}}
    for role, mapping in mappings.items():
        sections[role]["device_mapping"] = mapping
    return TrainRecipe.model_validate(
        {"experiment_name": "place", "cluster": {"n_gpus_per_node": 8}, "train_dataset": {"path": "d"}, **sections}
    )


def test_a_recipe_puts_roles_on_lists() -> None:
    placement = place(listed(actor="list(range(0,8,2))", rollout=[1, 3, 5, 6, 7]))
    assert indices(placement, "actor") == [0, 2, 4, 6]
    assert indices(placement, "rollout") == [1, 3, 5, 6, 7]
    assert placement["rollout"].layout.dp == 5
    assert placement.sharers("rollout") == ("actor",)


@pytest.mark.parametrize(
    ("mappings", "message"),
    [
        ({"actor": "0-3"}, "no list for rollout"),
        ({"actor": "0-3", "rollout": "4-"}, r"rollout\.device_mapping: `-` does not belong here"),
        ({"actor": "0-2", "rollout": "4-7"}, "d2t2 has 4 ranks, but its list has 3 devices"),
        ({"actor": "6-9", "rollout": "0-3"}, "actor is put on device 8"),
    ],
)
def test_a_list_that_does_not_fit_is_refused_with_its_role(mappings: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        place(listed(**mappings))


def test_lists_contradict_other_keys_that_place_roles() -> None:
    on_lists = listed(actor="0-3", rollout="4-7")
    colocated = on_lists.rollout.model_copy(update={"colocate": True})
    with pytest.raises(RecipeError, match=r"device_mapping and rollout\.colocate both say"):
        place(on_lists.model_copy(update={"rollout": colocated}))
    cpu = on_lists.cluster.model_copy(update={"n_gpus_per_node": 0})
    with pytest.raises(RecipeError, match="CPU processes"):
        place(on_lists.model_copy(update={"cluster": cpu}))


@pytest.mark.parametrize(
    ("actor", "rollout", "colocate", "message"),
    [
        ("megatron:d8", "vllm:d4", None, "their sizes differ: rollout 4, actor 8"),
        ("megatron:d16", "vllm:d16", None, "= 16 GPUs, but the cluster has"),
        ("megatron:d*", "vllm:d*", False, "two groups of devices ask for it"),
    ],
)
def test_roles_that_do_not_fit_the_cluster_are_refused(
    actor: str, rollout: str, colocate: bool | None, message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        place(recipe(actor, rollout, colocate=colocate))


@pytest.mark.parametrize(
    ("actor", "rollout", "colocate", "dp"),
    [
        ("megatron:d*t2", "vllm:d2", None, {"actor": 3, "rollout": 2}),
        ("megatron:d4t2", "vllm:d*", None, {"actor": 4, "rollout": 8}),
        ("megatron:d*t2", "vllm:d*", None, {"actor": 4, "rollout": 8}),
        ("megatron:d*", "vllm:d4", True, {"actor": 4, "rollout": 4}),
    ],
)
def test_stars_take_the_devices_that_are_left(
    actor: str, rollout: str, colocate: bool | None, dp: dict[str, int]
) -> None:
    placement = place(recipe(actor, rollout, colocate=colocate))
    assert {placed.role: placed.layout.dp for placed in placement.roles} == dp


def test_there_are_as_many_cpu_processes_as_roles_need() -> None:
    placement = place(recipe("megatron:(attn:d1t2p2c2|ffn:e4)", "transformers:d3", gpus=0, nodes=2))
    assert placement.is_cpu
    assert placement.n_devices_per_node == 6
    assert placement["actor"].devices[-1] == Device(1, 4)
    assert placement.warnings() == ()


def test_a_star_of_cpu_processes_needs_a_role_that_has_a_number() -> None:
    with pytest.raises(RecipeError, match="number of devices is not known"):
        place(recipe("megatron:d*", "transformers:d1", gpus=0))
    assert place(recipe("megatron:d2", "transformers:d*", gpus=0, colocate=True))["rollout"].layout.dp == 2


def test_the_reference_model_is_in_the_actor_unless_it_has_a_backend() -> None:
    assert "ref" not in place(recipe("megatron:d4", "vllm:d4", kl_ctl=0.1))
    own = place(recipe("megatron:d4", "vllm:d4", kl_ctl=0.1, ref={"backend": "megatron:d2t2"}))
    assert indices(own, "ref") == indices(own, "actor")
    assert own.sharers("ref") == ("actor",)
    with pytest.raises(RecipeError, match="their sizes differ: actor 4, ref 2"):
        place(recipe("megatron:d4", "vllm:d4", kl_ctl=0.1, ref={"backend": "megatron:d2"}))


def test_the_reference_of_dpo_is_placed_like_that_of_reinforcement_learning() -> None:
    keys: dict[str, Any] = {
        "experiment_name": "place",
        "cluster": {"n_nodes": 1, "n_gpus_per_node": 8},
        "train_dataset": {"path": "d"},
        "actor": {"path": "m", "backend": "megatron:d4"},
    }
    assert "ref" not in place(DPORecipe.model_validate(keys))
    own = place(DPORecipe.model_validate({**keys, "ref": {"backend": "megatron:d2t2"}}))
    assert indices(own, "ref") == indices(own, "actor")
    keys["actor"]["device_mapping"] = "0-3"
    beside = place(DPORecipe.model_validate({**keys, "ref": {"backend": "megatron:d2", "device_mapping": "6,7"}}))
    assert indices(beside, "ref") == [6, 7]
    with pytest.raises(ValueError, match="device_mapping=6,7 has no effect without backend"):
        DPORecipe.model_validate({**keys, "ref": {"device_mapping": "6,7"}})


def test_a_critic_shares_the_actors_devices_or_has_its_own() -> None:
    critic = {"path": "m", "backend": "megatron:d2t2"}
    shared = place(recipe("megatron:d4", "vllm:d4", critic=critic))
    assert indices(shared, "critic") == indices(shared, "actor") == [4, 5, 6, 7]
    apart = place(recipe("megatron:d2", "vllm:d2", critic={**critic, "colocate": False}))
    assert indices(apart, "critic") == [4, 5, 6, 7]
    assert apart.sharers("critic") == ()
    few = place(recipe("megatron:d4", "vllm:d4", critic={**critic, "colocate": False}))
    assert indices(few, "actor") == indices(few, "rollout")
    mode = "vllm[rollout]:d2+megatron[actor]:d2+megatron[critic]:d2t2"
    assert place(recipe(allocation_mode=mode, critic={"path": "m"})).roles == apart.roles
    virtual = {**critic, "backend": "megatron:d2p2", "megatron": {"virtual_pipeline_parallel_size": 2}}
    assert place(recipe("megatron:d4", "vllm:d4", critic=virtual))["critic"].layout.vpp == 2
    lists = {"device_mapping": "4-7"}
    listed = recipe("megatron:d8", "vllm:d8", critic={**critic, **lists})
    with pytest.raises(RecipeError, match="no list for actor, rollout"):
        place(listed)


def test_fine_tuning_has_no_role_but_the_actor() -> None:
    values = {
        "experiment_name": "s",
        "actor": {"path": "m", "backend": "megatron:d*t2"},
        "train_dataset": {"path": "d"},
    }
    placement = place(SFTRecipe.model_validate(values))
    assert [(placed.role, placed.layout.dp) for placed in placement.roles] == [("actor", 4)]
    with pytest.raises(KeyError, match="no role 'rollout'"):
        placement["rollout"]


def test_allocation_mode_says_the_same_as_the_keys_of_roles() -> None:
    mode = "sglang:d4t4+megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)"
    old = place(recipe(gpus=8, nodes=4, allocation_mode=mode))
    new = place(recipe("megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)", "sglang:d4t4", gpus=8, nodes=4))
    assert old == new
    assert old["rollout"].nodes == (0, 1)
    assert old["actor"].nodes == (2, 3)
    assert old.unused() == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"actor": "megatron:d4", "allocation_mode": "vllm:d2+megatron:d2"}, "actor.backend says `megatron.*:d4`"),
        (
            {"ref": {"backend": "megatron:d2"}, "kl_ctl": 0.1, "allocation_mode": "vllm:d2+megatron:d2"},
            "allocation_mode says no ref",
        ),
        ({"colocate": True, "allocation_mode": "vllm:d2+megatron:d2"}, r"colocate=true contradicts the `\+`"),
        ({"colocate": False, "allocation_mode": "vllm:d2|megatron:d2"}, r"colocate=false contradicts the `\|`"),
        ({"allocation_mode": "megatron:d2"}, "lays out no rollout"),
        ({"allocation_mode": "sglang[rollout]:d2+megatron[actor]:d4|megatron[critic]:d4"}, "recipe has no critic"),
        ({"allocation_mode": "vllm:d2+megatron:d2", "critic": {"path": "m"}}, "lays out no critic"),
        (
            {
                "allocation_mode": "vllm[rollout]:d2+megatron[actor]:d2+megatron[critic]:d2",
                "critic": {"path": "m", "colocate": True},
            },
            r"critic.colocate=true contradicts the `\+`",
        ),
        ({"allocation_mode": "vllm[rollout]:d2+fsdp[actor]:d2|fsdp[ref]:d2"}, "nothing compares the actor with"),
        ({"allocation_mode": "fsdp[rollout]:d2+megatron[actor]:d2"}, "the rollout cannot run fsdp, which trains"),
        ({"allocation_mode": "vllm:d2+megatron:d2d2"}, "allocation_mode: `d` .data. is given twice"),
        ({"actor": "vllm:d2"}, "the actor cannot run vllm, which only generates"),
    ],
)
def test_keys_that_contradict_one_another_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        place(recipe(**changes))


def test_all_layouts_that_cannot_be_read_are_listed() -> None:
    with pytest.raises(RecipeError) as caught:
        place(recipe("megatron:d4d2", "vlm:d2", kl_ctl=0.1, ref={"backend": "megatron"}))
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "actor.backend",
        "rollout.backend",
        "ref.backend",
    ]


def test_two_keys_may_say_the_same() -> None:
    mode = "vllm:d4|megatron:(attn:d2t2|ffn:d2t1e2)"
    assert "rollout" in place(recipe("megatron:d2t2e2", "vllm:d4", colocate=True, allocation_mode=mode))


@pytest.mark.parametrize(
    ("backend", "virtual", "vpp"),
    [("megatron:p2", 3, 3), ("megatron:p2v3", 3, 3), ("megatron:p2v3", 1, 3)],
)
def test_virtual_stages_come_from_either_key(backend: str, virtual: int, vpp: int) -> None:
    actor = {"backend": backend, "megatron": {"virtual_pipeline_parallel_size": virtual}}
    built = TrainRecipe.model_validate(
        {
            "experiment_name": "v",
            "actor": {"path": "m", **actor},
            "rollout": {"backend": "vllm:d2"},
            "train_dataset": {"path": "d"},
        }
    )
    assert place(built)["actor"].layout.vpp == vpp


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("megatron:p2v3", "virtual_pipeline_parallel_size=2 contradicts v3"),
        ("megatron:d2", "one stage only"),
        ("fsdp:d2", "fsdp takes d, t, c only"),
    ],
)
def test_virtual_stages_that_do_not_fit_are_refused(backend: str, message: str) -> None:
    actor = {"path": "m", "backend": backend, "megatron": {"virtual_pipeline_parallel_size": 2}}
    built = TrainRecipe.model_validate(
        {"experiment_name": "v", "actor": actor, "rollout": {"backend": "vllm:d2"}, "train_dataset": {"path": "d"}}
    )
    with pytest.raises(RecipeError, match=message):
        place(built)


def test_tensor_parallel_groups_across_nodes_are_reported() -> None:
    placement = place_allocation(parse("vllm:d2+megatron:d1t4"), n_nodes=2, n_gpus_per_node=4)
    assert placement["actor"].straddling_groups("tp") == ((0, 1, 2, 3),)
    unused, straddling = placement.warnings()
    assert "2 of 8 GPUs are unused: node 1: 2-3" in unused
    assert "1 tensor parallel group of actor crosses nodes (rank 0 on node 0, rank 3 on node 1)" in straddling


def test_roles_are_placed_by_lists_over_several_nodes() -> None:
    """Four nodes of eight: trainer and reference on all 32, generation on every other device."""
    everywhere = parse_devices("list(range(0,32))")
    placement = place_by_list(
        {
            "actor": (parse_role("megatron:t2p2v8e4d8"), everywhere),
            "ref": (parse_role("megatron:d*e4"), everywhere),
            "rollout": (parse_role("sglang:d*t2"), tuple(range(0, 32, 2))),
        },
        n_nodes=4,
        n_gpus_per_node=8,
    )
    assert placement["ref"].layout.dp == 32
    assert placement["rollout"].layout.dp == 8
    assert placement["rollout"].devices[:5] == (Device(0, 0), Device(0, 2), Device(0, 4), Device(0, 6), Device(1, 0))
    assert placement.sharers("ref") == ("actor", "rollout")
    assert placement.unused() == ()


@pytest.mark.parametrize(
    ("backend", "devices", "message"),
    [
        ("megatron:d4", (0, 1, 2), "4 ranks, but its list has 3 devices"),
        ("megatron:d2", (0, 32), "device 32, but the 4 . 8 GPUs are numbered 0 to 31"),
        ("megatron:d2", (0, 0), "device 0 twice"),
        ("megatron:d*t2", (0, 1, 2), "one replica takes"),
    ],
)
def test_a_list_that_does_not_fit_is_refused(backend: str, devices: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        place_by_list({"actor": (parse_role(backend), devices)}, n_nodes=4, n_gpus_per_node=8)
