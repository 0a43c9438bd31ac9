"""Which way weights take follows from the placement; a way that cannot work is refused early."""

from __future__ import annotations

from typing import Any

import pytest

from fivefold.config.schema.lora import LoraConfig
from fivefold.config.schema.train import TrainRecipe
from fivefold.layout.placement import place
from fivefold.weights.adapter import AdapterMemory
from fivefold.weights.table import TRANSPORTS, choose_route, transport_problems
from fivefold.weights.transport import Route


def recipe_of(allocation: str, n_gpus: int, rollout: dict[str, Any] | None = None, n_nodes: int = 1) -> TrainRecipe:
    return TrainRecipe.model_validate(
        {
            "experiment_name": "test",
            "allocation_mode": allocation,
            "cluster": {"n_nodes": n_nodes, "n_gpus_per_node": n_gpus},
            "actor": {"path": "model", "dtype": "bfloat16"},
            "rollout": rollout or {},
            "train_dataset": {"path": "data"},
        }
    )


def route_of(allocation: str, n_gpus: int, rollout: dict[str, Any] | None = None, n_nodes: int = 1) -> Route:
    recipe = recipe_of(allocation, n_gpus, rollout, n_nodes)
    return choose_route(recipe, place(recipe))


@pytest.mark.parametrize(
    ("allocation", "n_gpus", "transport"),
    [
        ("vllm:d2|megatron:d2", 2, "ipc"),
        ("vllm:d1t2|megatron:d1p2", 2, "ipc"),
        ("vllm:d1+megatron:d1", 2, "nccl"),
        ("sglang:d2|megatron:d2", 2, "ipc"),
        ("sglang:t2+megatron:d2", 4, "nccl"),
        ("transformers:d2|megatron:d2", 2, "folder"),
        ("vllm:d2|megatron:d2", 0, "folder"),
    ],
)
def test_the_fastest_way_that_engine_and_placement_allow_is_taken(allocation: str, n_gpus: int, transport: str) -> None:
    assert route_of(allocation, n_gpus).transport is TRANSPORTS[transport]


@pytest.mark.parametrize(
    ("allocation", "n_gpus", "transport"),
    [
        ("sglang:d2|megatron:d2", 2, "folder"),
        ("transformers:d2|megatron:d2", 2, "ipc"),
        ("sglang:t2+megatron:d2", 4, "folder"),
    ],
)
def test_every_engine_gets_the_way_that_is_asked_for(allocation: str, n_gpus: int, transport: str) -> None:
    assert route_of(allocation, n_gpus, {"weight_transport": transport}).transport is TRANSPORTS[transport]


def test_ranks_without_an_engine_on_their_device_export_nothing() -> None:
    lists = {"device_mapping": [2, 3], "backend": "vllm:d2", "weight_transport": "auto"}
    recipe = recipe_of("vllm:d2|megatron:d2", 4).model_copy(update={"allocation_mode": None})
    values = recipe.model_dump(exclude_none=True)
    values |= {"rollout": lists, "actor": {"path": "m", "backend": "megatron:d4", "device_mapping": [3, 0, 1, 2]}}
    chosen = TrainRecipe.model_validate(values)
    assert choose_route(chosen, place(chosen)) == Route(TRANSPORTS["ipc"], "bfloat16", False, readers=frozenset({0, 3}))


def test_nccl_counts_the_processes_of_all_engines() -> None:
    assert route_of("vllm:d2t2+megatron:d4", 8).n_receivers == 4
    assert route_of("vllm:d2t2+megatron:d4", 4, {"dtype": "float32"}, n_nodes=2) == Route(
        TRANSPORTS["nccl"], "float32", False, n_receivers=4
    )


@pytest.mark.parametrize(
    ("allocation", "n_gpus", "rollout", "message"),
    [
        ("vllm:d1|megatron:d1", 0, {"weight_transport": "ipc"}, "without GPUs there is no CUDA IPC: .* one of folder"),
        ("vllm:d1+megatron:d1", 2, {"weight_transport": "ipc"}, "1 of the rollout's 1 GPUs hold no rank of the actor"),
        ("vllm:d2|megatron:d2", 2, {"weight_transport": "nccl"}, "the actor's first GPU is one of the rollout's"),
        ("transformers:d1+megatron:d1", 2, {"weight_transport": "nccl"}, "transformers has no end for it"),
        ("sglang:p2|megatron:d2", 2, {"weight_transport": "ipc"}, "SGLang takes weights on GPUs without pipeline"),
        ("sglang:d2|megatron:d2", 2, {"verify_weights": True}, "which SGLang does not report"),
    ],
)
def test_a_way_that_cannot_work_is_refused(allocation: str, n_gpus: int, rollout: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        route_of(allocation, n_gpus, rollout)


@pytest.mark.parametrize(
    ("allocation", "transport"),
    [
        ("vllm:t4p2+megatron:d8", "nccl"),
        ("sglang:t8+megatron:d8", "nccl"),
        ("vllm:t4p2|megatron:d8", "ipc"),
        ("sglang:t8|megatron:d8", "ipc"),
    ],
)
def test_the_files_on_one_node_are_no_way_to_a_replica_on_several(allocation: str, transport: str) -> None:
    n_nodes = 4 if "+" in allocation else 2
    assert route_of(allocation, 4, n_nodes=n_nodes).transport is TRANSPORTS[transport]
    with pytest.raises(ValueError, match=rf"folder, but a replica is on 2 nodes, .*: use auto, or one of {transport}"):
        route_of(allocation, 4, {"weight_transport": "folder"}, n_nodes=n_nodes)


def test_a_replica_that_weights_cannot_reach_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"no rollout.weight_transport can bring .*: ipc: SGLang takes .*; nccl: .* one"
    ):
        route_of("sglang:t4p2|megatron:d8", 4, n_nodes=2)


def test_the_folder_can_be_asked_for_on_shared_gpus() -> None:
    assert route_of("vllm:d2|megatron:d2", 2, {"weight_transport": "folder"}) == Route(
        TRANSPORTS["folder"], "bfloat16", False, readers=frozenset({0})
    )


AHEAD = {"max_head_offpolicyness": 1}


@pytest.mark.parametrize(
    ("allocation", "rollout", "overlaps"),
    [
        ("transformers:d1+megatron:d1", AHEAD, True),
        ("sglang:d1+megatron:d1", {}, False),
        ("sglang:d2|megatron:d2", AHEAD, False),
        ("vllm:d1+megatron:d1", AHEAD | {"weight_transport": "folder"}, True),
        ("vllm:d1+megatron:d1", AHEAD | {"overlap_weight_sync": True}, True),
    ],
)
def test_the_trainer_goes_on_where_a_copy_of_its_weights_is_all_that_the_engines_need(
    allocation: str, rollout: dict[str, Any], overlaps: bool
) -> None:
    assert route_of(allocation, 2, rollout).overlaps_training == overlaps
    if not overlaps:
        with pytest.raises(ValueError, match=r"overlap_weight_sync=true, but .*: set it to null"):
            route_of(allocation, 2, rollout | {"overlap_weight_sync": True})
    assert not route_of(allocation, 2, rollout | {"overlap_weight_sync": False}).overlaps_training


def test_by_nccl_the_trainer_goes_on_only_if_the_recipe_says_so() -> None:
    assert not route_of("vllm:d1+megatron:d1", 2, AHEAD).overlaps_training


def test_a_transport_that_does_not_exist_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(
        ValueError, match=r"=nlcc is none of auto, ipc, nccl, folder, adapter, served_adapter; did you mean nccl"
    ):
        route_of("vllm:d1+megatron:d1", 2, {"weight_transport": "nlcc"})


def test_adapters_travel_alone_where_that_is_asked_for() -> None:
    allocation, asked = "transformers:d1+megatron:d1", {"weight_transport": "adapter"}
    recipe = recipe_of(allocation, 2, asked)
    lora = LoraConfig(rank=8, alpha=16.0, use_rslora=True)
    adapted = recipe.model_copy(update={"actor": recipe.actor.model_copy(update={"lora": lora})})
    found = choose_route(adapted, place(adapted)).transport
    assert found == AdapterMemory(merged_dtype="bfloat16", alpha=16.0, rank_stabilized=True)
    assert found.scale(4) == 8.0
    for n_gpus, way in ((2, "vllm:d2|megatron:d2"), (0, allocation)):
        assert not route_of(way, n_gpus).transport.sends_adapters, "auto never picks it"


@pytest.mark.parametrize(
    ("actor", "message"),
    [
        ({}, "sends the adapters of actor.lora, and the actor has none"),
        ({"lora": {"rank": 8}, "init_from_scratch": True}, "actor.init_from_scratch begins with others"),
        (
            {"lora": {"rank": 8}, "megatron": {"use_dist_checkpointing": True, "dist_checkpointing_path": "folder"}},
            "use_dist_checkpointing begins",
        ),
    ],
)
def test_adapters_do_not_travel_alone_to_weights_that_are_not_the_actors(actor: dict[str, Any], message: str) -> None:
    values = recipe_of("vllm:d1+megatron:d1", 2, {"weight_transport": "adapter"}).model_dump(exclude_unset=True)
    recipe = TrainRecipe.model_validate(values | {"actor": values["actor"] | actor})
    assert any(message in problem for problem in transport_problems(recipe))
    with pytest.raises(ValueError, match=message):
        choose_route(recipe, place(recipe))


def served(allocation: str, rollout: dict[str, Any] | None = None) -> Route:
    values = recipe_of(allocation, 2, {"weight_transport": "served_adapter"} | (rollout or {}))
    fields = values.model_dump(exclude_unset=True)
    recipe = TrainRecipe.model_validate(fields | {"actor": fields["actor"] | {"lora": {"rank": 8}}})
    return choose_route(recipe, place(recipe))


@pytest.mark.parametrize("allocation", ["vllm:d2|megatron:d2", "sglang:d1+megatron:d1"])
def test_servers_have_adapters_next_to_their_weights_where_that_is_asked_for(allocation: str) -> None:
    transport = served(allocation).transport
    assert transport.serves_adapters
    assert transport.sends_adapters


@pytest.mark.parametrize(
    ("allocation", "rollout", "message"),
    [
        ("transformers:d1+megatron:d1", {}, "served_adapter, but transformers merges adapters into its weights"),
        ("vllm:d1+megatron:d1", {"verify_weights": True}, "rollout.verify_weights compares weights that"),
        ("vllm:d1+megatron:d1", {"quantization": "fp8_per_block"}, "rollout.quantization=fp8_per_block changes those"),
    ],
)
def test_what_cannot_be_with_adapters_next_to_weights_is_refused(
    allocation: str, rollout: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        served(allocation, rollout)
