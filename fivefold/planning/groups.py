"""Groups of ranks that communicate, and how many of them stay inside a node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from fivefold.layout.grid import Axis, group_stride
from fivefold.layout.parallel import ParallelLayout
from fivefold.layout.placement import Device, RolePlacement
from fivefold.planning.traffic import Dimension

TRAINING_AXES: dict[Dimension, tuple[Axis, ...]] = {
    "tp": ("tp",),
    "cp": ("cp",),
    "etp": ("etp",),
    "ep": ("ep",),
    # Gradients of attention are reduced over the data and context parallel ranks together.
    "dp": ("cp", "dp"),
    "edp": ("edp",),
    "pp": ("pp",),
}
INFERENCE_AXES: dict[Dimension, tuple[Axis, ...]] = {"tp": ("tp",), "pp": ("pp",)}
"""Replicas of an inference engine do not communicate, so they form no group."""
EXPERT_DIMENSIONS = ("etp", "ep", "edp")


@dataclass(frozen=True)
class GroupSpread:
    """The groups of one dimension."""

    dimension: Dimension
    size: int
    """Ranks of a group."""
    n_groups: int
    n_inside: int
    """Groups with all ranks on one node."""
    ranks_per_node: int
    """Fewest ranks of a group on one node."""


def group_spreads(placed: RolePlacement, *, is_moe: bool) -> tuple[GroupSpread, ...]:
    """Return the spread of each dimension that has groups; expert dimensions only if the model `is_moe`."""
    return tuple(_spreads(placed, is_moe))


def shown(dimension: Dimension, layout: ParallelLayout) -> str:
    """Return the displayed name of a dimension's groups: `dp` groups include the context parallel ranks."""
    return "dp x cp" if dimension == "dp" and layout.cp > 1 else dimension


def ranks_together(placed: RolePlacement, *, is_moe: bool) -> dict[Dimension, int]:
    """Return how many ranks of a group share a node, by dimension."""
    return {spread.dimension: spread.ranks_per_node for spread in group_spreads(placed, is_moe=is_moe)}


def from_node_start(layout: ParallelLayout, gpus_per_node: int) -> RolePlacement:
    """Return an actor with rank 0 on the first GPU of a node, and the other ranks on the GPUs after it."""
    devices = (Device(*divmod(rank, gpus_per_node)) for rank in range(layout.world_size))
    return RolePlacement("actor", layout, tuple(devices))


def _spreads(placed: RolePlacement, is_moe: bool) -> Iterator[GroupSpread]:
    nodes = tuple(device.node for device in placed.devices)
    for dimension, axes in (TRAINING_AXES if placed.layout.is_training else INFERENCE_AXES).items():
        stride, size = group_stride(placed.layout, *axes)
        if size == 1 or (dimension in EXPERT_DIMENSIONS and not is_moe):
            continue
        n_inside, ranks_per_node = _node_counts(nodes, stride, size)
        yield GroupSpread(dimension, size, len(nodes) // size, n_inside, ranks_per_node)


@lru_cache(maxsize=1024)
def _node_counts(nodes: tuple[int, ...], stride: int, size: int) -> tuple[int, int]:
    """Return (groups on one node, fewest ranks of a group on one node). Neighbours in a group are `stride` ranks apart.

    Cached, because a search asks for the same few groups in hundreds of layouts.
    """
    span = stride * size
    firsts = (block + offset for block in range(0, len(nodes), span) for offset in range(stride))
    counts = [Counter(nodes[first : first + span : stride]) for first in firsts]
    return sum(len(count) == 1 for count in counts), min(min(count.values()) for count in counts)
