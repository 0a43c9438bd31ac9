"""Load and export on 8 gloo processes, bit for bit against shards cut by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from sharding_by_hand import LAYOUTS, Layout, Position, shard_by_hand
from torch import Tensor

from fivefold.bridge import export
from fivefold.bridge.bridge import Bridge
from fivefold.bridge.groups import ShardGroups
from fivefold.bridge.hf_reader import HFWeights
from fivefold.families.read import load_shape
from fivefold.weights.stream import unstacked
from tests.forks import forking

WORLD = 8
DENSE = ("llama", "qwen2", "qwen3")
MOE = ("qwen3_moe", "qwen2_moe", "mixtral")
CHECKS = ("load", "export", "export mixed", "export as bfloat16", "export to two ranks", "order")
ONE_OF_TP2, ONE_OF_EP4, ONE_OF_ALL = LAYOUTS[0], LAYOUTS[3], LAYOUTS[7]
WORK = {
    "rank 0 reads, tp2": (ONE_OF_TP2, {0}, {"tp": {0, 1}}),
    "ranks 0 and 5 read, tp2": (ONE_OF_TP2, {0, 5}, {"tp": {0, 1, 4, 5}}),
    "rank 6 reads, ep4": (ONE_OF_EP4, {6}, {"ep": {4, 5, 6, 7}}),
    # Ranks 1, 5, 3 and 7 give rank 0 parts of dense weights, parts of experts, and parts of other experts.
    "rank 0 reads, tp2 etp2 ep2 pp2": (
        ONE_OF_ALL,
        {0},
        {"tp": {0, 1, 4, 5}, "ep": {0, 2, 4, 6}, "etp": set(range(8)), "pp": {0, 4}},
    ),
}
"""Exports of which few ranks read: layout, readers, and the ranks that may use groups of each kind."""


def case_name(family: str, layout: Layout) -> str:
    stages = "|".join(",".join(map(str, layers)) for layers in layout.layers)
    return f"{family} tp{layout.tp} etp{layout.etp} ep{layout.ep} layers {stages}"


def layouts_of(family: str) -> tuple[Layout, ...]:
    """Return all layouts for a dense and an MoE family, and one or two for the others, which differ in names only."""
    dense = tuple(layout for layout in LAYOUTS if layout.etp == layout.ep == 1)
    return {"qwen2": dense, "qwen3_moe": LAYOUTS}.get(family, dense[-1:] if family in DENSE else LAYOUTS[-3:-1])


CASES = [(family, layout) for family in (*DENSE, *MOE) for layout in layouts_of(family)]


def strided_groups(layout: Layout, rank: int) -> tuple[Position, ShardGroups]:
    """Return a rank's place in Megatron-Core's order: tensor ranks side by side, pipeline stages furthest apart."""
    stage = WORLD // layout.pp
    at = Position(
        tp=rank % layout.tp,
        etp=rank % layout.etp,
        ep=rank // layout.etp % layout.ep,
        pp=rank // stage,
    )

    def group(index: int, size: int, stride: int) -> dist.ProcessGroup | None:
        first = rank - index * stride
        ranks = [first + i * stride for i in range(size)]
        return dist.new_group(ranks, use_local_synchronization=True) if size > 1 else None

    return at, ShardGroups(
        tp_rank=at.tp,
        tp_size=layout.tp,
        tp_group=group(at.tp, layout.tp, 1),
        etp_rank=at.etp,
        etp_size=layout.etp,
        etp_group=group(at.etp, layout.etp, 1),
        ep_rank=at.ep,
        ep_size=layout.ep,
        ep_group=group(at.ep, layout.ep, layout.etp),
        pp_rank=at.pp,
        pp_size=layout.pp,
        pp_group=group(at.pp, layout.pp, stage),
    )


def differences(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    strays = sorted(got.keys() ^ wanted.keys())
    return strays + [
        n for n in got.keys() & wanted.keys() if got[n].dtype != wanted[n].dtype or not got[n].equal(wanted[n])
    ]


def is_outline(got: Tensor | None, wanted: Tensor) -> bool:
    return got is not None and got.is_meta and got.shape == wanted.shape and got.dtype == wanted.dtype


def groups_used(folder: Path, layout: Layout, at: Position, groups: ShardGroups, readers: frozenset[int]) -> list[str]:
    """Return the kinds of groups over which this rank sends anything in an export that `readers` read."""
    config = json.loads((folder / "config.json").read_text())
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    with HFWeights(folder) as source:
        shards = shard_by_hand({name: source.read(name) for name in source.names}, config, layout, at)
    kinds = {"tp": groups.tp_group, "ep": groups.ep_group, "etp": groups.etp_group, "pp": groups.pp_group}
    used: set[str] = set()

    def noted(collective: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any, group: dist.ProcessGroup, **options: Any) -> None:
            used.add(next(kind for kind, own in kinds.items() if own is group))
            collective(*args, group=group, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "_all_gather_single", noted(export._all_gather_single))
        patch.setattr(dist, "broadcast", noted(dist.broadcast))
        for _ in Bridge(load_shape(folder)).export(shards, groups, readers=readers):
            pass
    return sorted(used)


def is_router(name: str) -> bool:
    return name.endswith((".mlp.gate.weight", ".block_sparse_moe.gate.weight"))


def check_case(folder: Path, layout: Layout, at: Position, groups: ShardGroups) -> dict[str, list[str]]:
    """Return what differs, by check; nothing is raised, so that all ranks stay in step."""
    config = json.loads((folder / "config.json").read_text())
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    bridge = Bridge(load_shape(folder))
    with HFWeights(folder) as source:
        hf = {name: source.read(name) for name in source.names}
        wanted = shard_by_hand(hf, config, layout, at)
        loaded = {name: torch.full_like(tensor, torch.nan, requires_grad=True) for name, tensor in wanted.items()}
        bridge.load(loaded, source, groups)
    gradients = {name: tensor * torch.randn(()) for name, tensor in sorted(hf.items())}
    half = {name: tensor.bfloat16() for name, tensor in hf.items()}
    shards = shard_by_hand(gradients, config, layout, at)
    mixed = {name: tensor if is_router(name) else tensor.bfloat16() for name, tensor in hf.items()}
    mixed_shards = shard_by_hand(mixed, config, layout, at)
    small_buckets = Bridge(load_shape(folder), bucket_bytes=1000)
    exported = dict(unstacked(bridge.export(shards, groups)))
    readers = frozenset({1, 6})
    given = dict(unstacked(small_buckets.export(shards, groups, readers=readers)))
    if dist.get_rank() not in readers:
        given = {name: tensor for name, tensor in gradients.items() if is_outline(given.get(name), tensor)}
    return {
        "load": differences(loaded, wanted),
        "export": differences(exported, gradients),
        "export mixed": differences(dict(unstacked(small_buckets.export(mixed_shards, groups))), mixed),
        "export as bfloat16": differences(dict(unstacked(bridge.export(loaded, groups, dtype=torch.bfloat16))), half),
        "export to two ranks": differences(given, gradients),
        "order": [] if list(exported) == list(bridge.expected_names()) else list(exported),
    }


def check_stray_errors(folder: Path, layout: Layout, at: Position, groups: ShardGroups) -> dict[str, str]:
    """Return each rank's messages about a layer that no stage has, and about a parameter that nothing maps."""
    bridge = Bridge(load_shape(folder))
    config = json.loads((folder / "config.json").read_text())
    with HFWeights(folder) as source:
        hf = {name: source.read(name) for name in source.names}
        short = replace(layout, layers=tuple(tuple(i for i in stage if i != 1) for stage in layout.layers))
        missing = shard_by_hand(hf, config, short, at)
        stray = shard_by_hand(hf, config, layout, at)
        if at.pp == 1:
            stray["decoder.final_norm.weight"] = stray.pop("decoder.final_layernorm.weight")
        return {
            "missing layer": message(bridge, missing, source, groups),
            "stray": message(bridge, stray, source, groups),
        }


def message(bridge: Bridge, parameters: dict[str, Tensor], source: HFWeights, groups: ShardGroups) -> str:
    with pytest.raises(ValueError) as raised:
        bridge.load(parameters, source, groups)
    return str(raised.value)


def worker(rank: int, folders: dict[str, Path], scratch: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{scratch}/store", rank=rank, world_size=WORLD)
    places = {layout: strided_groups(layout, rank) for layout in LAYOUTS}
    torch.manual_seed(0)
    found: dict[str, object] = {
        case_name(family, layout): check_case(folders[family], layout, *places[layout]) for family, layout in CASES
    }
    found["work"] = {
        name: groups_used(folders["qwen3_moe"], layout, *places[layout], frozenset(readers))
        for name, (layout, readers, _) in WORK.items()
    }
    found["errors"] = check_stray_errors(folders["qwen3"], LAYOUTS[4], *places[LAYOUTS[4]])
    (scratch / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(
    hf_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, dict[str, list[str]]]]:
    """Return what each of the 8 ranks found, by case. The processes are started once for all cases."""
    scratch = tmp_path_factory.mktemp("layouts")
    forking()  # prepares the server from which the processes are forked
    mp.start_processes(worker, (hf_models, scratch), nprocs=WORLD, start_method="forkserver")
    return [json.loads((scratch / f"{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.mark.parametrize(("family", "layout"), CASES, ids=[case_name(*case) for case in CASES])
def test_shards_and_full_tensors_are_bit_exact(
    found: list[dict[str, dict[str, list[str]]]], family: str, layout: Layout
) -> None:
    assert [rank[case_name(family, layout)] for rank in found] == [{check: [] for check in CHECKS}] * WORLD


@pytest.mark.parametrize("case", WORK)
def test_ranks_whose_result_nobody_reads_send_nothing(found: list[dict[str, dict[str, list[str]]]], case: str) -> None:
    by_hand = WORK[case][2]
    used = [set(rank["work"][case]) for rank in found]
    assert used == [{kind for kind, ranks in by_hand.items() if number in ranks} for number in range(WORLD)]


def test_every_rank_names_the_layer_that_no_stage_has(found: list[dict[str, dict[str, str]]]) -> None:
    for rank in found:
        assert "decoder.layers.1.mlp.linear_fc1.weight" in rank["errors"]["missing layer"]
        assert "no pipeline stage has" in rank["errors"]["missing layer"]


def test_every_rank_names_strays_and_what_they_resemble(found: list[dict[str, dict[str, str]]]) -> None:
    for rank in found:
        assert "decoder.final_norm.weight (nearest: decoder.final_layernorm.weight)" in rank["errors"]["stray"]
        assert "decoder.final_layernorm.weight (nearest: decoder.final_norm.weight)" in rank["errors"]["stray"]
