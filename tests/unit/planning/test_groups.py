"""Groups of ranks that stay inside a node, for roles that are placed by an allocation or on lists of devices."""

from __future__ import annotations

import pytest

from fivefold.families.read import find_shape
from fivefold.layout.gpus import find_gpu
from fivefold.layout.grid import rank_groups
from fivefold.layout.parser import parse, parse_role
from fivefold.layout.placement import place_allocation, place_by_list
from fivefold.planning.groups import TRAINING_AXES, GroupSpread, from_node_start, group_spreads, ranks_together
from fivefold.planning.stages import stages
from fivefold.planning.timing import step_time
from fivefold.planning.traffic import step_traffic
from fivefold.planning.workload import Workload

WORK = Workload(4096, 64, 8192)


def spreads(text: str, role: str = "actor", n_nodes: int = 2, *, is_moe: bool = True) -> dict[str, GroupSpread]:
    placed = place_allocation(parse(text), n_nodes, 8)[role]
    return {spread.dimension: spread for spread in group_spreads(placed, is_moe=is_moe)}


def test_a_folded_layout_has_the_groups_of_both_its_halves() -> None:
    found = spreads("sglang:d4t4+megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)", n_nodes=4)
    assert {name: (each.n_groups, each.size) for name, each in found.items()} == {
        "tp": (8, 2), "cp": (8, 2), "ep": (4, 4), "dp": (8, 2), "pp": (4, 4)
    }  # fmt: skip
    assert {name for name, each in found.items() if each.n_inside < each.n_groups} == {"pp"}
    assert found["pp"].ranks_per_node == 2


def test_a_dense_model_has_no_groups_of_experts() -> None:
    assert "edp" in spreads("megatron:d4t4")
    assert set(spreads("megatron:d4t4", is_moe=False)) == {"tp", "dp"}


def test_replicas_of_an_engine_have_no_group() -> None:
    assert set(spreads("sglang:d4t4", "rollout")) == {"tp"}


@pytest.mark.parametrize("backend", ["(attn:d4p2t4c2|ffn:e16)", "(attn:d8t4|ffn:t4e8)", "d8p2t2c4e32", "d16t2e4"])
def test_traffic_knows_how_much_of_each_group_is_on_one_node(backend: str) -> None:
    shape = find_shape("Qwen3-30B-A3B")
    found = spreads(f"megatron:{backend}", n_nodes=16)
    layout = parse(f"megatron:{backend}").resolve()["actor"]
    together = ranks_together(from_node_start(layout, 8), is_moe=True)
    for item in step_traffic(layout, shape, WORK, stages(layout, shape)[0], together):
        spread = found[item.dimension]
        assert item.ranks_per_node == spread.ranks_per_node
        assert item.crosses_nodes == (spread.n_inside < spread.n_groups)


def test_tensor_parallel_groups_over_two_nodes_take_longer() -> None:
    shape, gpu = find_shape("Qwen3-8B"), find_gpu("h100")
    found = spreads("sglang:d4+megatron:d1t8", is_moe=False)
    assert (found["tp"].n_inside, found["tp"].ranks_per_node) == (0, 4)
    layout = parse_role("megatron:t8").resolve()
    apart = step_time(layout, shape, WORK, gpu, {"tp": found["tp"].ranks_per_node})
    beside = step_time(layout, shape, WORK, gpu, ranks_together(from_node_start(layout, 8), is_moe=False))
    assert apart.exposed > 2 * beside.exposed


def test_a_list_of_devices_decides_which_ranks_share_a_node() -> None:
    role = parse_role("megatron:d2t2")
    across = place_by_list({"actor": (role, (0, 8, 1, 9))}, 2, 8)["actor"]
    tensor, data = group_spreads(across, is_moe=False)
    assert (tensor.dimension, tensor.n_inside) == ("tp", 0)
    assert (data.dimension, data.n_inside) == ("dp", 2)


@pytest.mark.parametrize("backend", ["(attn:d3p2t2c2|ffn:e4)", "(attn:d4p3t2|ffn:t2e4)", "d3p2t2c2"])
@pytest.mark.parametrize("first", [0, 3, 5])
def test_spreads_are_those_of_groups_counted_rank_by_rank(backend: str, first: int) -> None:
    devices = tuple(range(first, first + 48, 2))[:24]
    placed = place_by_list({"actor": (parse_role(f"megatron:{backend}"), devices)}, 8, 8)["actor"]
    found = {spread.dimension: spread for spread in group_spreads(placed, is_moe=True)}
    for dimension, axes in TRAINING_AXES.items():
        groups = [[devices[rank] // 8 for rank in group] for group in rank_groups(placed.layout, *axes)]
        if len(groups[0]) == 1:
            assert dimension not in found
            continue
        counts = [[nodes.count(node) for node in set(nodes)] for nodes in groups]
        inside = sum(len(count) == 1 for count in counts)
        assert found[dimension] == GroupSpread(
            dimension, len(groups[0]), len(groups), inside, min(min(count) for count in counts)
        )
