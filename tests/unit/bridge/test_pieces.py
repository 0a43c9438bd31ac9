"""Pieces against shards cut by hand: for all mappings, sizes and ranks, and for cuts at any element."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sharding_by_hand import Layout, Position, shard_by_hand
from torch import Tensor

from fivefold.bridge.decoder import expected_tensors, mappings
from fivefold.bridge.groups import ShardGroups
from fivefold.bridge.mapping import WeightMapping
from fivefold.bridge.pieces import Piece
from fivefold.families.read import read_shape


@st.composite
def models(draw: st.DrawFn) -> tuple[dict[str, Any], Layout]:
    """Draw the config of a small model with all kinds of mappings, and a layout that divides it."""
    tp, etp, ep = (draw(st.sampled_from((1, 2, 3))) for _ in range(3))
    layers = draw(st.sampled_from((((0, 1),), ((0,), (1,)))))
    kv_heads = tp * draw(st.integers(1, 2))
    head_dim = 2 * draw(st.integers(1, 2))
    heads = kv_heads * draw(st.integers(1, 3))
    config = {
        "model_type": "qwen2_moe",
        "vocab_size": draw(st.integers(2, 9)),
        "hidden_size": heads * head_dim,
        "intermediate_size": tp * draw(st.integers(1, 3)),
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_experts": ep * draw(st.integers(1, 2)),
        "num_experts_per_tok": 1,
        "moe_intermediate_size": etp * draw(st.integers(1, 3)),
        "shared_expert_intermediate_size": tp * draw(st.integers(1, 3)),
        "mlp_only_layers": [1],
        "tie_word_embeddings": draw(st.booleans()),
        "max_position_embeddings": 32,
    }
    return config, Layout(tp=tp, etp=etp, ep=ep, layers=layers)


def positions(layout: Layout) -> Iterator[Position]:
    sizes = (layout.tp, layout.etp, layout.ep, layout.pp)
    yield from itertools.starmap(Position, itertools.product(*map(range, sizes)))


def groups_at(layout: Layout, at: Position) -> ShardGroups:
    """Return the place of a rank whose groups are never used."""
    ranks = {f"{name}_rank": getattr(at, name) for name in ("tp", "etp", "ep", "pp")}
    sizes = {f"{name}_size": getattr(layout, name) for name in ("tp", "etp", "ep", "pp")}
    return ShardGroups(**ranks, **sizes, **{f"{name}_group": Mock() for name in ("tp", "etp", "ep", "pp")})


def full_tensors(config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the model's tensors. No two elements are equal, and none is zero."""
    shapes = expected_tensors(read_shape(config))
    numbers = torch.arange(1, 1 + sum(torch.Size(shape).numel() for shape in shapes.values()))
    parts = numbers.split([torch.Size(shape).numel() for shape in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def shards(config: Mapping[str, Any], layout: Layout, at: Position) -> Iterator[tuple[WeightMapping, Tensor]]:
    """Yield each parameter of a rank: its mapping, and its shard as it is cut by hand."""
    hf = full_tensors(config)
    by_name = {mapping.parameter: mapping for mapping in mappings(read_shape(config))}
    heads = {**config, "head_dim": config["hidden_size"] // config["num_attention_heads"]}
    for name, shard in shard_by_hand(hf, heads, layout, at).items():
        yield by_name[name], shard


@settings(max_examples=12, deadline=None)
@given(models())
def test_a_shard_consists_of_its_pieces_and_of_padding(model: tuple[dict[str, Any], Layout]) -> None:
    config, layout = model
    hf = full_tensors(config)
    for at in positions(layout):
        for mapping, shard in shards(config, layout, at):
            covered = torch.zeros_like(shard)
            end = 0
            for piece in mapping.pieces(groups_at(layout, at)):
                assert piece.shape == hf[piece.name].shape
                assert piece.view(shard).equal(hf[piece.name][piece.index]), piece
                assert piece.start >= end
                piece.view(covered).fill_(1)
                end = piece.end
            assert covered.equal((shard != 0).to(covered.dtype)), mapping


@settings(max_examples=12, deadline=None)
@given(models())
def test_stored_pieces_of_all_ranks_tile_every_tensor_once(model: tuple[dict[str, Any], Layout]) -> None:
    config, layout = model
    times_stored = {name: torch.zeros_like(tensor) for name, tensor in full_tensors(config).items()}
    written: set[tuple[str, int, int, int]] = set()
    for at in positions(layout):
        for mapping, _ in shards(config, layout, at):
            # Ranks that differ along dimensions over which the parameter is not cut are data-parallel replicas.
            place = (at.etp, at.ep) if mapping.domain == "expert" else (at.tp, 0)
            if (mapping.parameter, *place, at.pp) in written:
                continue
            written.add((mapping.parameter, *place, at.pp))
            for piece in mapping.stored_pieces(groups_at(layout, at)):
                times_stored[piece.name][piece.index] += 1
    assert [name for name, times in times_stored.items() if not (times == 1).all()] == []


@settings(max_examples=12, deadline=None)
@given(models(), st.lists(st.floats(0, 1), max_size=4))
def test_pieces_within_ranges_of_a_shard_tile_what_its_pieces_cover(
    model: tuple[dict[str, Any], Layout], cuts: list[float]
) -> None:
    config, layout = model
    hf = full_tensors(config)
    at = Position(layout.tp - 1, layout.etp - 1, layout.ep - 1, 0)
    for mapping, shard in shards(config, layout, at):
        bounds = sorted({0, shard.numel(), *(int(cut * shard.numel()) for cut in cuts)})
        pieces = list(mapping.pieces(groups_at(layout, at)))
        times_covered = torch.zeros_like(shard)
        for begin, end in itertools.pairwise(bounds):
            flat = shard.flatten()[begin:end]
            for piece in pieces:
                parts = list(piece.within(begin, end))
                assert len(parts) <= 3
                for part in parts:
                    assert part.view(flat, begin).equal(hf[part.name][part.index]), part
                    part.view(times_covered).add_(1)
        assert times_covered.equal((shard != 0).to(times_covered.dtype)), mapping


@pytest.mark.parametrize(
    ("begin", "end", "parts"),
    [
        (0, 6, []),
        (10, 22, [((1, 4), (4, 3), 10)]),
        (11, 12, [((1, 5), (1, 1), 11)]),
        (11, 21, [((1, 5), (1, 2), 11), ((2, 4), (2, 3), 13), ((4, 4), (1, 2), 19)]),
        (12, 14, [((1, 6), (1, 1), 12), ((2, 4), (1, 1), 13)]),
        (0, 99, [((1, 4), (4, 3), 10)]),
    ],
    ids=["before", "all", "one element", "rows with both ends", "two ends", "beyond"],
)
def test_a_range_cuts_a_piece_into_rows_and_ends_of_rows(
    begin: int, end: int, parts: list[tuple[tuple[int, ...], tuple[int, ...], int]]
) -> None:
    piece = Piece("w", (6, 8), offsets=(1, 4), sizes=(4, 3), start=10)
    wanted = [replace(piece, offsets=offsets, sizes=sizes, start=start) for offsets, sizes, start in parts]
    assert list(piece.within(begin, end)) == wanted


def test_a_range_cuts_the_rows_of_a_convolution() -> None:
    piece = Piece("w", (6, 1, 4), offsets=(1, 0, 0), sizes=(3, 1, 4), start=10)
    weight, flat = torch.arange(24).view(6, 1, 4), torch.full((22,), -1)
    for part in piece.within(12, 19):
        part.view(flat)[:] = weight[part.index]
    assert flat.tolist() == [-1] * 12 + list(range(6, 13)) + [-1] * 3


def test_a_piece_has_rows_and_columns() -> None:
    with pytest.raises(ValueError, match="rows and columns"):
        Piece("w", (2, 3, 4), (0, 0, 0), (2, 3, 4), 0)
