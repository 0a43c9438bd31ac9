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


LAYOUTS = [random_layout(random.Random(seed)) for seed in range(200)]


def as_sets(groups: object) -> set[tuple[int, ...]]:
    return {tuple(group) for group in groups}  # type: ignore[attr-defined]


def test_groups_are_those_of_megatron_core() -> None:
    names = {"etp": "tp", "ep": "ep", "edp": "dp", "pp": "pp"}
    for layout in LAYOUTS:
        dense = RankGenerator(tp=layout.tp, ep=1, dp=layout.dp, pp=layout.pp, cp=layout.cp, order=ORDER)
        for axes in DENSE:
            assert as_sets(rank_groups(layout, *axes)) == as_sets(dense.get_ranks("-".join(axes))), (layout, axes)
        experts = RankGenerator(tp=layout.etp, ep=layout.ep, dp=layout.edp, pp=layout.pp, cp=1, order=ORDER)
        for axes in EXPERTS:
            expected = experts.get_ranks("-".join(names[axis] for axis in axes))
            assert as_sets(rank_groups(layout, *axes)) == as_sets(expected), (layout, axes)


def test_a_rank_has_its_index_within_each_of_its_groups() -> None:
    for layout in LAYOUTS:
        grid = rank_grid(layout)
        for axis in ("tp", "cp", "dp", "pp", "etp", "ep", "edp"):
            for group in rank_groups(layout, axis):
                assert [grid[rank].index(axis) for rank in group] == list(range(len(group))), (layout, axis)


def test_attention_and_experts_number_the_same_ranks_in_two_ways() -> None:
    """16 ranks: TP 2 and CP 2 for attention, EP 4 on the same four ranks of each stage."""
    layout = parse_backend("megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)")
    assert rank_grid(layout)[6] == RankPosition(rank=6, tp=0, cp=1, dp=0, pp=1, ep=2, etp=0, edp=0)
    assert rank_groups(layout, "ep") == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15))


def test_a_replica_of_a_server_keeps_its_ranks_together() -> None:
    layout = parse_backend("vllm:d2t2p2")
    assert rank_groups(layout, "tp", "pp") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert [position.pp for position in rank_grid(layout)] == [0, 0, 1, 1] * 2


def test_axes_of_attention_and_of_experts_cannot_be_mixed() -> None:
    with pytest.raises(ValueError, match="rank_groups got tp, ep"):
        rank_groups(parse_backend("megatron:d2t2e2"), "tp", "ep")


@pytest.mark.parametrize(("pp", "vpp", "size"), [(1, 1, 4), (2, 1, 3), (2, 2, 2), (3, 4, 1), (4, 3, 2), (8, 6, 4)])
def test_stages_hold_the_layers_of_megatron_core(pp: int, vpp: int, size: int) -> None:
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


def test_stages_take_virtual_stages_in_turn() -> None:
    assert stage_layers(parse_backend("megatron:p2v2"), 8, 0) == (range(0, 2), range(4, 6))
    with pytest.raises(ValueError, match="3 layers are too few"):
        stage_layers(parse_backend("megatron:p2v2"), 3, 0)
