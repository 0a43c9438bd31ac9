"""The route of a run's weights from the trainer to the rollout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fivefold.config.schema.train import TrainRecipe
from fivefold.layout.placement import Placement
from fivefold.layout.transport import Transport, pick_transport

TITLES: Mapping[Transport, str] = {
    "ipc": "on the GPU, by CUDA IPC",
    "nccl": "from GPU to GPU, by NCCL",
    "folder": "through host memory",
}
"""What a run's banner says of each transport."""


@dataclass(frozen=True)
class Route:
    """The way of a run's weights."""

    transport: Transport
    dtype: str
    """Dtype in which they travel, as in `torch.<dtype>`; the offsets of routers are float32."""
    checksum: bool
    """Whether what arrives is compared with what was sent."""
    exporters: frozenset[int] = frozenset()
    """With `ipc`, the trainer's ranks whose devices an engine is on."""
    n_receivers: int = 0
    """With `nccl`, the processes of all engines."""
    beside_training: bool = False
    """Whether the trainer goes on with its next step as soon as a copy of the weights is in host memory, from which the
    engines take them."""

    @property
    def readers(self) -> frozenset[int]:
        """The trainer's ranks that send weights, and so need all of them in full."""
        return self.exporters if self.transport == "ipc" else frozenset({0})


FOLDER = Route("folder", "float32", checksum=False)
"""The route of an actor whose weights nobody reads."""


def choose_route(recipe: TrainRecipe, placement: Placement) -> Route:
    """Return the route of a recipe's weights: the one it names, or the fastest that its engine and placement allow.

    Raises:
        ValueError: `rollout.weight_transport` names one that cannot work, nothing can check what arrives, or the
            trainer is to go on where it cannot.
    """
    transport = pick_transport(recipe.rollout.weight_transport, placement)
    if recipe.rollout.verify_weights and placement["rollout"].layout.backend == "sglang":
        raise ValueError(
            "rollout.verify_weights=true compares what arrived, which SGLang does not tell: drop it, or use vllm"
        )
    rollout, actor = placement["rollout"].devices, placement["actor"].devices
    asked, obstacle = recipe.rollout.overlap_weight_sync, _obstacle_to_overlap(recipe, placement)
    if asked and obstacle is not None:
        raise ValueError(f"rollout.overlap_weight_sync=true, but {obstacle}: set it to null")
    return Route(
        transport,
        recipe.rollout.dtype or recipe.actor.dtype,
        recipe.rollout.verify_weights,
        exporters=frozenset(rank for rank, device in enumerate(actor) if device in rollout and transport == "ipc"),
        n_receivers=len(rollout) if transport == "nccl" else 0,
        # By NCCL, the copy is an extra one, and the broadcast beside the training has not been measured on GPUs.
        beside_training=obstacle is None and (transport == "folder" if asked is None else asked),
    )


def _obstacle_to_overlap(recipe: TrainRecipe, placement: Placement) -> str | None:
    """Return why the trainer waits until the engines have its weights; None: it need not."""
    if recipe.rollout.max_head_offpolicyness == 0:
        return "with max_head_offpolicyness=0 the next step begins with samples of these weights"
    if placement.sharers("rollout"):
        return "the rollout shares devices with other roles, which work in turn"
    return None
