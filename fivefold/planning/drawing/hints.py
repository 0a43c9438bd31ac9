"""What a page says about a device when it is pointed at: its rank, its memory and the groups that it is in."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fivefold.families.shape import ModelShape
from fivefold.layout.gpus import Gpu
from fivefold.layout.grid import RankPosition, group_stride
from fivefold.planning.groups import EXPERT_DIMENSIONS, TRAINING_AXES, shown
from fivefold.planning.role_plans import TrainerPlan, gb
from fivefold.planning.stages import stages

MOST_RANKS = 16
"""Ranks of a group that are listed."""


def device_hint(trainer: TrainerPlan, shape: ModelShape, gpu: Gpu | None) -> Callable[[RankPosition], str]:
    """Return what gives the text about the device of a rank; `gpu` is None where ranks are processes on CPUs."""
    placed = trainer.placed
    parts = stages(placed.layout, shape)
    memory = {stage.stage: stage for stage in trainer.memory}

    def hint(position: RankPosition) -> str:
        device, stage = placed.devices[position.rank], memory[position.pp]
        of = f" of {gb(gpu.memory)} GB" if gpu is not None else " GB"
        needed = f"{gb(stage.total + trainer.beside)}{of} at the highest moment"
        kinds = ", ".join(f"{name} {gb(size)}" for name, size in _kinds(trainer, position.pp) if size)
        lines = [
            f"rank {position.rank} of {placed.role}: node {device.node}, device {device.local}",
            f"stage {position.pp}: layers {parts[position.pp].summary}",
            f"{needed} ({kinds})",
            *_groups(trainer, position.rank, is_moe=shape.is_moe),
        ]
        return "\n".join(lines)

    return hint


def _kinds(trainer: TrainerPlan, stage: int) -> Iterator[tuple[str, int]]:
    memory = trainer.memory[stage]
    yield from (
        ("weights", memory.weights), ("reference", memory.reference), ("gradients", memory.gradients),
        ("optimizer", memory.optimizer), ("activations", memory.activations),
    )  # fmt: skip


def _groups(trainer: TrainerPlan, rank: int, *, is_moe: bool) -> Iterator[str]:
    for dimension, axes in TRAINING_AXES.items():
        stride, size = group_stride(trainer.placed.layout, *axes)
        if size == 1 or (dimension in EXPERT_DIMENSIONS and not is_moe):
            continue
        first = rank - rank // stride % size * stride
        members = [str(first + place * stride) for place in range(size)]
        more = f" … {members[-1]}" if size > MOST_RANKS else ""
        name = shown(dimension, trainer.placed.layout)
        yield f"{name} group: {' '.join(members[: MOST_RANKS if not more else MOST_RANKS - 1])}{more}"
