"""The rank grid against Megatron-Core's own generator of groups."""

from __future__ import annotations

import random

import pytest
import torch
from megatron.core.parallel_state import RankGenerator
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from fivefold.layout.grid import Axis, RankPosition, rank_grid, rank_groups, stage_layers
from fivefold.layout.parallel import ParallelLayout
from fivefold.layout.parser import parse_backend

ORDER = "tp-cp-ep-dp-pp"
DENSE: list[list[Axis]] = [["tp"], ["cp"], ["dp"], ["pp"], ["dp", "cp"], ["tp", "cp"], ["tp", "pp"]]
EXPERTS: list[list[Axis]] = [["etp"], ["ep"], ["edp"], ["etp", "ep"], ["etp", "ep", "pp"]]


def random_layout(rng: random.Random) -> ParallelLayout:
    tp, pp, cp, dp = (rng.choice((1, 1, 2, 3, 4)) for _ in range(4))
    ranks = tp * cp * dp
    ep = rng.choice([n for n in range(1, ranks + 1) if ranks % n == 0])
    etp = rng.choice([n for n in range(1, ranks // ep + 1) if (ranks // ep) % n == 0])
    return ParallelLayout("megatron", tp=tp, pp=pp, cp=cp, dp=dp, vpp=1, ep=ep, etp=etp, edp=ranks // (ep * etp))


def as_sets(groups: object) -> set[tuple[int, ...]]:
    return {tuple(group) for group in groups}  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", range(300))
def test_groups_are_those_of_megatron_core(seed: int) -> None:
    layout = random_layout(random.Random(seed))
    dense = RankGenerator(tp=layout.tp, ep=1, dp=layout.dp, pp=layout.pp, cp=layout.cp, order=ORDER)
    experts = RankGenerator(tp=layout.etp, ep=layout.ep, dp=layout.edp, pp=layout.pp, cp=1, order=ORDER)
    for axes in DENSE:
        assert as_sets(rank_groups(layout, *axes)) == as_sets(dense.get_ranks("-".join(axes)))
    names = {"etp": "tp", "ep": "ep", "edp": "dp", "pp": "pp"}
    for axes in EXPERTS:
        assert as_sets(rank_groups(layout, *axes)) == as_sets(experts.get_ranks("-".join(names[axis] for axis in axes)))


@pytest.mark.parametrize("seed", range(300, 400))
def test_a_rank_is_its_index_within_its_group(seed: int) -> None:
    layout = random_layout(random.Random(seed))
    grid = rank_grid(layout)
    for axis in ("tp", "cp", "dp", "pp", "etp", "ep", "edp"):
        for group in rank_groups(layout, axis):
            assert [grid[rank].index(axis) for rank in group] == list(range(len(group)))


def test_seed_example() -> None:
    """16 ranks: TP 2 and CP 2 for attention, EP 4 on the same four ranks of each stage."""
    layout = parse_backend("megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)")
    assert rank_grid(layout)[6] == RankPosition(rank=6, tp=0, cp=1, dp=0, pp=1, ep=2, etp=0, edp=0)
    assert rank_groups(layout, "ep") == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15))


def test_an_inference_replica_keeps_its_ranks_together() -> None:
    layout = parse_backend("vllm:d2t2p2")
    assert rank_groups(layout, "tp", "pp") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert [position.pp for position in rank_grid(layout)] == [0, 0, 1, 1] * 2


def test_axes_of_two_families_cannot_be_mixed() -> None:
    with pytest.raises(ValueError, match="rank_groups got tp, ep"):
        rank_groups(parse_backend("megatron:d2t2e2"), "tp", "ep")


@pytest.mark.parametrize("text", ["megatron:p1", "megatron:p4", "megatron:p2v2", "megatron:p4v3"])
def test_stages_hold_each_layer_once(text: str) -> None:
    layout = parse_backend(text)
    stages = [stage_layers(layout, 24, stage) for stage in range(layout.pp)]
    assert sorted(layer for stage in stages for chunk in stage for layer in chunk) == list(range(24))
    assert all(len(stage) == layout.vpp for stage in stages)


@pytest.mark.parametrize("seed", range(100))
def test_virtual_stages_hold_the_layers_of_megatron_core(seed: int) -> None:
    rng = random.Random(seed)
    pp, vpp, size = rng.randint(2, 8), rng.randint(1, 6), rng.randint(1, 4)
    config = TransformerConfig(
        num_layers=pp * vpp * size,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        pipeline_dtype=torch.float32,
    )
    layout = parse_backend(f"megatron:p{pp}v{vpp}")
    for stage in range(pp):
        chunks = stage_layers(layout, config.num_layers, stage)
        offsets = [
            get_transformer_layer_offset(config, vp_stage=chunk if vpp > 1 else None, pp_rank=stage)
            for chunk in range(vpp)
        ]
        assert chunks == tuple(range(offset, offset + size) for offset in offsets)


def test_virtual_stages_are_dealt_in_turn() -> None:
    assert stage_layers(parse_backend("megatron:p2v2"), 8, 0) == (range(0, 2), range(4, 6))
    with pytest.raises(ValueError, match="7 layers"):
        stage_layers(parse_backend("megatron:p2v2"), 7, 0)
