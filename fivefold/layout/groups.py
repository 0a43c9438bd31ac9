"""Groups of ranks that exchange data, and how many of them stay inside a node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from fivefold.layout.grid import Axis, rank_groups
from fivefold.layout.placement import RolePlacement
from fivefold.layout.traffic import Dimension

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
"""Replicas of an inference engine have nothing to say to one another."""
EXPERT_DIMENSIONS = ("etp", "ep", "edp")


@dataclass(frozen=True)
class GroupSpread:
    """The groups of one dimension."""

    dimension: Dimension
    size: int
    """Ranks of a group."""
    n_groups: int
    n_inside: int
    """Groups whose ranks all sit on one node."""
    ranks_per_node: int
    """Ranks of a group on one node, counted where they are fewest."""


def group_spreads(placed: RolePlacement, *, is_moe: bool) -> tuple[GroupSpread, ...]:
    """The spread of each dimension that has groups; without experts, those of experts do not count."""
    return tuple(_spreads(placed, is_moe))


def _spreads(placed: RolePlacement, is_moe: bool) -> Iterator[GroupSpread]:
    nodes = [device.node for device in placed.devices]
    for dimension, axes in (TRAINING_AXES if placed.layout.is_training else INFERENCE_AXES).items():
        groups = rank_groups(placed.layout, *axes)
        size = len(groups[0])
        if size == 1 or (dimension in EXPERT_DIMENSIONS and not is_moe):
            continue
        counts = [Counter(nodes[rank] for rank in group) for group in groups]
        yield GroupSpread(
            dimension=dimension,
            size=size,
            n_groups=len(groups),
            n_inside=sum(len(count) == 1 for count in counts),
            ranks_per_node=min(min(count.values()) for count in counts),
        )
