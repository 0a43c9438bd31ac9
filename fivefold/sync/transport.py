"""How weights travel from the trainer to the rollout, and which way a placement allows.

ipc      the trainer's buffers are opened by the engine, which is on the same GPU; one buffer is filled while the
         other is loaded
nccl     rank 0 of the trainer broadcasts its buffer to all processes of the engines, which are on other GPUs
folder   through host memory: the object store, and for servers a folder of files
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fivefold.config.schema.train import TrainRecipe
from fivefold.layout.placement import Placement

Transport = Literal["ipc", "nccl", "folder"]

TITLES: Mapping[Transport, str] = {
    "ipc": "on the GPU, by CUDA IPC",
    "nccl": "from GPU to GPU, by NCCL",
    "folder": "through host memory",
}
"""What a run's banner says of each transport."""

_MEASURED = frozenset({"vllm"})
"""Engines whose ends of `ipc` and `nccl` have been measured on GPUs; `auto` takes these transports for no other."""


@dataclass(frozen=True)
class Route:
    """The way of a run's weights."""

    transport: Transport
    dtype: str
    """Dtype in which they travel, as in `torch.<dtype>`."""
    checksum: bool
    """Whether what arrives is compared with what was sent."""
    exporters: frozenset[int] = frozenset()
    """With `ipc`, the trainer's ranks whose devices an engine is on."""
    n_receivers: int = 0
    """With `nccl`, the processes of all engines."""

    @property
    def readers(self) -> frozenset[int]:
        """The trainer's ranks that send weights, and so need all of them in full."""
        return self.exporters if self.transport == "ipc" else frozenset({0})


FOLDER = Route("folder", "float32", checksum=False)
"""The route of an actor whose weights nobody reads."""


def choose_route(recipe: TrainRecipe, placement: Placement) -> Route:
    """Return the route of a recipe's weights: the one it names, or the fastest that its engine and placement allow.

    Raises:
        ValueError: `rollout.weight_transport` names one that cannot work, or nothing can check what arrives.
    """
    asked = recipe.rollout.weight_transport
    obstacles = {"ipc": _obstacle_to_ipc(placement), "nccl": _obstacle_to_nccl(placement), "folder": None}
    if asked != "auto" and (reason := obstacles[asked]) is not None:
        free = ", ".join(name for name, obstacle in obstacles.items() if obstacle is None)
        raise ValueError(f"rollout.weight_transport={asked}, but {reason}: use auto, or one of {free}")
    backend = placement["rollout"].layout.backend
    if recipe.rollout.verify_weights and backend == "sglang":
        raise ValueError(
            "rollout.verify_weights=true compares what arrived, which SGLang does not tell: drop it, or use vllm"
        )
    order: tuple[Transport, ...] = ("ipc", "nccl", "folder")
    wanted = "folder" if asked == "auto" and backend not in _MEASURED else asked
    transport = next(name for name in order if wanted in ("auto", name) and obstacles[name] is None)
    rollout, actor = placement["rollout"].devices, placement["actor"].devices
    return Route(
        transport,
        recipe.rollout.dtype or recipe.actor.dtype,
        recipe.rollout.verify_weights,
        exporters=frozenset(rank for rank, device in enumerate(actor) if device in rollout and transport == "ipc"),
        n_receivers=len(rollout) if transport == "nccl" else 0,
    )


def _obstacle_to_ipc(placement: Placement) -> str | None:
    """Return why the engines cannot open the trainer's buffers; None: they can."""
    if placement.is_cpu:
        return "without GPUs there is no CUDA IPC"
    rollout = placement["rollout"]
    if foreign := set(rollout.devices) - set(placement["actor"].devices):
        return f"{len(foreign)} of the rollout's {len(rollout.devices)} GPUs hold no rank of the actor"
    return _obstacle_to_stages(placement)


def _obstacle_to_nccl(placement: Placement) -> str | None:
    """Return why rank 0 of the actor cannot broadcast to the engines; None: it can."""
    if placement.is_cpu:
        return "without GPUs there is no NCCL"
    rollout = placement["rollout"]
    if not rollout.layout.is_server:
        return f"{rollout.layout.backend} has no end for it: it is for servers"
    if placement["actor"].devices[0] in rollout.devices:
        return "the actor's first GPU is one of the rollout's, and NCCL takes one process on each GPU"
    return _obstacle_to_stages(placement)


def _obstacle_to_stages(placement: Placement) -> str | None:
    layout = placement["rollout"].layout
    if layout.backend == "sglang" and layout.pp > 1:
        return f"SGLang takes weights on GPUs without pipeline stages, and the rollout has p{layout.pp}"
    return None
