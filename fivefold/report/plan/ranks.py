"""The place of every rank: its device, stage and layers, its index in each dimension, and its groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fivefold.families.shape import ModelShape
from fivefold.layout.gpus import Gpu
from fivefold.layout.grid import RankPosition, group_stride, rank_grid
from fivefold.layout.placement import RolePlacement
from fivefold.planning.estimates import ModelEstimate, gb
from fivefold.planning.groups import EXPERT_DIMENSIONS, TRAINING_AXES, shown
from fivefold.planning.stages import stages

RANK_COLUMNS = ("rank", "node", "device", "stage", "layers", "dp", "cp", "tp", "edp", "ep", "etp")
MOST_RANKS = 16
"""Ranks of a group that a hint lists."""


def rank_rows(placed: RolePlacement, shape: ModelShape) -> Iterator[tuple[int | str, ...]]:
    """Yield one row of `RANK_COLUMNS` for each rank of a training role."""
    layers = [stage.summary for stage in stages(placed.layout, shape)]
    for at, device in zip(rank_grid(placed.layout), placed.devices, strict=True):
        yield (
            at.rank, device.node, device.local, at.pp, layers[at.pp], at.dp, at.cp, at.tp, at.edp, at.ep, at.etp
        )  # fmt: skip


def device_hint(model: ModelEstimate, shape: ModelShape, gpu: Gpu | None) -> Callable[[RankPosition], str]:
    """Return a function that writes the hint of a rank's device: its place, its memory and its groups.

    `gpu` is None if ranks are CPU processes.
    """
    placed = model.placed
    parts = stages(placed.layout, shape)
    memory = {stage.stage: stage for stage in model.memory}

    def hint(position: RankPosition) -> str:
        device, stage = placed.devices[position.rank], memory[position.pp]
        of = f" of {gb(gpu.memory)} GB" if gpu is not None else " GB"
        needed = f"{gb(stage.total + model.others)}{of} at the peak"
        kinds = ", ".join(f"{name} {gb(size)}" for name, size in _kinds(model, position.pp) if size)
        lines = [
            f"rank {position.rank} of {placed.role}: node {device.node}, device {device.local}",
            f"stage {position.pp}: layers {parts[position.pp].summary}",
            f"{needed} ({kinds})",
            *_groups(model, position.rank, is_moe=shape.is_moe),
        ]
        return "\n".join(lines)

    return hint


def _kinds(model: ModelEstimate, stage: int) -> Iterator[tuple[str, int]]:
    memory = model.memory[stage]
    yield from (
        ("weights", memory.weights), ("reference", memory.reference), ("gradients", memory.gradients),
        ("optimizer", memory.optimizer), ("activations", memory.activations),
    )  # fmt: skip


def _groups(model: ModelEstimate, rank: int, *, is_moe: bool) -> Iterator[str]:
    for dimension, axes in TRAINING_AXES.items():
        stride, size = group_stride(model.placed.layout, *axes)
        if size == 1 or (dimension in EXPERT_DIMENSIONS and not is_moe):
            continue
        first = rank - rank // stride % size * stride
        members = [str(first + place * stride) for place in range(size)]
        more = f" … {members[-1]}" if size > MOST_RANKS else ""
        name = shown(dimension, model.placed.layout)
        yield f"{name} group: {' '.join(members[: MOST_RANKS if not more else MOST_RANKS - 1])}{more}"
