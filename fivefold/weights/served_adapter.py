"""Low-rank adapters alone, through host memory, to servers that keep them next to their own weights.

    trainer   A, B of every layer ──> buckets ──> object store ──> folder of PEFT ──> server   W x + scale * B (A x)

Each server has the weights of the model's files, which never change, and the adapters of the last update.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from fivefold.config.schema.train import TrainRecipe
from fivefold.layout.placement import Placement
from fivefold.weights.adapter import AdapterMemory


@dataclass(frozen=True)
class ServedAdapter(AdapterMemory):
    """Rank 0 packs the adapters into buckets, which the replicas of servers write to files in memory."""

    name: ClassVar[str] = "served_adapter"
    title: ClassVar[str] = "adapters alone, which servers keep next to the weights"
    serves_adapters: ClassVar[bool] = True

    def unfit(self, recipe: TrainRecipe) -> Iterator[str]:
        """Yield a line for each thing in a recipe with which it cannot work."""
        yield from super().unfit(recipe)
        asked = f"rollout.weight_transport={self.name}"
        if recipe.rollout.verify_weights:
            yield (
                f"{asked} compares log-probs before the first step, and rollout.verify_weights compares weights that "
                "servers load, which are none here: drop it"
            )
        if recipe.rollout.quantization is not None:
            yield (
                f"{asked} adds adapters to weights as they are in files, and rollout.quantization="
                f"{recipe.rollout.quantization} changes those: drop it, or use auto"
            )

    def obstacle(self, placement: Placement) -> str | None:
        """Return why no server can take adapters; None: one can."""
        rollout = placement["rollout"].layout
        if not rollout.is_server:
            return f"{rollout.backend} merges adapters into its weights (rollout.weight_transport=adapter)"
        return super().obstacle(placement)
