"""The place of every rank: its device, its stage and layers, and its index in each dimension."""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.families.shape import ModelShape
from fivefold.layout.grid import rank_grid
from fivefold.layout.placement import RolePlacement
from fivefold.planning.stages import stages

RANK_COLUMNS = ("rank", "node", "device", "stage", "layers", "dp", "cp", "tp", "edp", "ep", "etp")


def rank_rows(placed: RolePlacement, shape: ModelShape) -> Iterator[tuple[int | str, ...]]:
    """Yield one row of `RANK_COLUMNS` for each rank of a role that trains."""
    layers = [stage.summary for stage in stages(placed.layout, shape)]
    for at, device in zip(rank_grid(placed.layout), placed.devices, strict=True):
        yield (
            at.rank, device.node, device.local, at.pp, layers[at.pp], at.dp, at.cp, at.tp, at.edp, at.ep, at.etp
        )  # fmt: skip
