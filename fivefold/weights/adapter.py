"""Low-rank adapters alone, through host memory: each replica merges them into the weights of the model's own files.

    trainer   A, B of every layer ──> buckets ──> object store ──> replica   W + scale * B A, for every W of the files

The trainer gathers its adapters and nothing else, and the rest of the model neither crosses the network nor waits in
the object store.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from fivefold.config.schema.train import TrainRecipe
from fivefold.families.adapters import AdapterShape
from fivefold.weights.host_memory import HostMemory


@dataclass(frozen=True)
class AdapterMemory(HostMemory):
    """Rank 0 packs the adapters into buckets, which every replica reads from the object store."""

    name: ClassVar[str] = "adapter"
    title: ClassVar[str] = "adapters alone, through host memory"
    measured_with: ClassVar[frozenset[str] | None] = frozenset()
    sends_adapters: ClassVar[bool] = True

    merged_dtype: str = "float32"
    """Dtype of the actor's weights, in which they are merged."""
    alpha: float = 1.0
    rank_stabilized: bool = False

    def unfit(self, recipe: TrainRecipe) -> Iterator[str]:
        """Yield a line for each thing in a recipe with which it cannot work."""
        actor, asked = recipe.actor, f"rollout.weight_transport={self.name}"
        if actor.lora is None:
            yield f"{asked} sends the adapters of actor.lora, and the actor has none: use auto"
        for key, is_set in (
            ("actor.init_from_scratch", actor.init_from_scratch),
            ("actor.megatron.use_dist_checkpointing", actor.megatron.use_dist_checkpointing),
        ):
            if is_set:
                yield f"{asked} needs the weights of actor.path in the rollout, and {key} begins with others: use auto"

    def fitted(self, recipe: TrainRecipe) -> AdapterMemory:
        """Return the transport of a recipe, which fits it."""
        lora = recipe.actor.lora
        assert lora is not None, "`unfit` comes first"
        return replace(self, merged_dtype=recipe.actor.dtype, alpha=lora.alpha, rank_stabilized=lora.use_rslora)

    def scale(self, rank: int) -> float:
        """Return the factor of B A."""
        shape = AdapterShape(rank, expert_rank=None, alpha=self.alpha, rank_stabilized=self.rank_stabilized)
        return shape.scale(rank)
