"""The grid of ranks: each rank's index in every dimension, as in Megatron-Core's process groups.

Megatron-Core numbers ranks in the order tp-cp-ep-dp-pp, with tensor parallelism fastest. Attention and experts number
the same ranks of a stage in two ways:

    rank of a stage    0   1   2   3   4   5   6   7        megatron:(attn:d2t2c2|ffn:t1e4)
    attention tp,cp,dp 000 100 010 110 001 101 011 111
    experts   ep,edp   00  10  20  30  01  11  21  31
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Literal

from fivefold.layout.parallel import ParallelLayout
from fivefold.layout.stages import chunk_sizes

Axis = Literal["tp", "cp", "dp", "pp", "ep", "etp", "edp"]

DENSE_AXES: tuple[Axis, ...] = ("tp", "cp", "dp", "pp")
EXPERT_AXES: tuple[Axis, ...] = ("etp", "ep", "edp", "pp")
REPLICA_AXES: tuple[Axis, ...] = ("tp", "pp", "dp")
"""Engines that generate keep the ranks of a replica together, so pipeline stages come before replicas."""


@dataclass(frozen=True)
class RankPosition:
    """The index of one rank in each dimension."""

    rank: int
    tp: int
    cp: int
    dp: int
    pp: int
    ep: int
    etp: int
    edp: int

    def index(self, axis: Axis) -> int:
        """Return the index along `axis`."""
        index: int = getattr(self, axis)
        return index


def rank_grid(layout: ParallelLayout) -> tuple[RankPosition, ...]:
    """Return the position of every rank, in the order of ranks."""
    return tuple(_position(layout, rank) for rank in range(layout.world_size))


def _position(layout: ParallelLayout, rank: int) -> RankPosition:
    dense_axes = DENSE_AXES if layout.is_training else REPLICA_AXES
    dense = _unravel(layout, dense_axes, rank)
    if layout.is_training:
        experts = _unravel(layout, EXPERT_AXES, rank)
    else:
        experts = {"etp": dense["tp"], "ep": 0, "edp": dense["dp"]}
    return RankPosition(rank=rank, **{"cp": 0, **experts, **dense})


def _unravel(layout: ParallelLayout, axes: tuple[Axis, ...], rank: int) -> dict[str, int]:
    """Return `rank` as mixed-radix digits, the first axis fastest."""
    digits: dict[str, int] = {}
    for axis in axes:
        rank, digits[axis] = divmod(rank, getattr(layout, axis))
    return digits


def rank_groups(layout: ParallelLayout, *axes: Axis) -> tuple[tuple[int, ...], ...]:
    """Return the groups of ranks that differ in `axes` only, such as `rank_groups(layout, "dp", "cp")`.

    Axes of attention (tp, cp, dp) and of experts (etp, ep, edp) cannot be mixed; pp goes with both.

    Raises:
        ValueError: axes of attention and of experts together.
    """
    families = (DENSE_AXES, EXPERT_AXES)
    family = next((family for family in families if set(axes) <= set(family)), None)
    if family is None:
        raise ValueError(
            f"rank_groups got {', '.join(axes)}; "
            f"take them from {', '.join(DENSE_AXES)} or from {', '.join(EXPERT_AXES)}"
        )
    groups: dict[tuple[int, ...], list[int]] = {}
    for position in rank_grid(layout):
        key = tuple(position.index(axis) for axis in family if axis not in axes)
        groups.setdefault(key, []).append(position.rank)
    return tuple(tuple(ranks) for ranks in groups.values())


def group_stride(layout: ParallelLayout, *axes: Axis) -> tuple[int, int]:
    """Return (distance between neighbours in a group, ranks of a group), for neighbouring axes of `rank_groups`."""
    orders = (DENSE_AXES, EXPERT_AXES) if layout.is_training else (REPLICA_AXES,)
    order = next(order for order in orders if set(axes) <= set(order))
    inner = order[: min(order.index(axis) for axis in axes)]
    return prod(getattr(layout, axis) for axis in inner), prod(getattr(layout, axis) for axis in axes)


def stage_layers(layout: ParallelLayout, n_layers: int, pp_rank: int) -> tuple[range, ...]:
    """Return the layers of pipeline stage `pp_rank`, one range for each of its virtual stages.

    The stages take chunks in turn: with pp2 vpp2 and 8 layers, stage 0 has layers 0-1 and 4-5.

    Raises:
        ValueError: layers that cannot be divided as the layout says.
    """
    sizes = chunk_sizes(n_layers, layout.pp, layout.vpp, layout.split)
    ends = tuple(accumulate(sizes))
    return tuple(range(end - size, end) for end, size in zip(ends, sizes, strict=True))[pp_rank :: layout.pp]
