"""Which rank does what: each rank's place in every dimension, with the numbers that Megatron-Core's groups give.

Megatron-Core lays ranks out in the order tp-cp-ep-dp-pp, tensor parallelism fastest. Attention and experts walk the
same ranks of a stage in two ways:

    rank of a stage    0   1   2   3   4   5   6   7        megatron:(attn:d2t2c2|ffn:t1e4)
    attention tp,cp,dp 000 100 010 110 001 101 011 111
    experts   ep,edp   00  10  20  30  01  11  21  31
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal, get_args

from fivefold.layout.parallel import ParallelLayout

Axis = Literal["tp", "cp", "dp", "pp", "ep", "etp", "edp"]
AXES: tuple[Axis, ...] = get_args(Axis)

DENSE_AXES: tuple[Axis, ...] = ("tp", "cp", "dp", "pp")
EXPERT_AXES: tuple[Axis, ...] = ("etp", "ep", "edp", "pp")
REPLICA_AXES: tuple[Axis, ...] = ("tp", "pp", "dp")
"""Inference engines keep a replica's ranks together, so pipeline stages come before replicas."""


@dataclass(frozen=True)
class RankPosition:
    """One rank's index in each dimension."""

    rank: int
    tp: int
    cp: int
    dp: int
    pp: int
    ep: int
    etp: int
    edp: int

    def index(self, axis: Axis) -> int:
        """The index along `axis`."""
        index: int = getattr(self, axis)
        return index


def rank_grid(layout: ParallelLayout) -> tuple[RankPosition, ...]:
    """The position of every rank, in rank order."""
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
    """`rank` as mixed-radix digits, the first axis fastest."""
    digits: dict[str, int] = {}
    for axis in axes:
        rank, digits[axis] = divmod(rank, getattr(layout, axis))
    return digits


def rank_groups(layout: ParallelLayout, *axes: Axis) -> tuple[tuple[int, ...], ...]:
    """The groups of ranks that differ in `axes` only, such as `rank_groups(layout, "dp", "cp")`.

    Axes of attention (tp, cp, dp) and of experts (etp, ep, edp) cannot be mixed; pp goes with both.
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
    """(how far apart neighbours of a group are, ranks of a group), for axes of `rank_groups` that lie side by side."""
    orders = (DENSE_AXES, EXPERT_AXES) if layout.is_training else (REPLICA_AXES,)
    order = next(order for order in orders if set(axes) <= set(order))
    inner = order[: min(order.index(axis) for axis in axes)]
    return prod(getattr(layout, axis) for axis in inner), prod(getattr(layout, axis) for axis in axes)


def stage_layers(layout: ParallelLayout, n_layers: int, pp_rank: int) -> tuple[range, ...]:
    """The layers of pipeline stage `pp_rank`, one range for each of its virtual stages.

    Chunks are dealt out to the stages in turn: with pp2 vpp2 and 8 layers, stage 0 has layers 0-1 and 4-5.
    """
    chunks = layout.pp * layout.vpp
    if n_layers % chunks:
        raise ValueError(f"{n_layers} layers do not divide into {chunks} equal parts (p{layout.pp}*v{layout.vpp})")
    size = n_layers // chunks
    starts = [(chunk * layout.pp + pp_rank) * size for chunk in range(layout.vpp)]
    return tuple(range(start, start + size) for start in starts)
