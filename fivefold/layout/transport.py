"""Ways of weights from the trainer to the rollout, and which of them a placement allows.

ipc      the trainer's buffers are opened by the engine, which is on the same GPU; one buffer is filled while the
         other is loaded
nccl     rank 0 of the trainer broadcasts its buffer to all processes of the engines, which are on other GPUs
folder   through host memory: the object store, and for servers a folder of files on the replica's node
"""

from __future__ import annotations

from typing import Literal

from fivefold.layout.placement import Placement

Transport = Literal["ipc", "nccl", "folder"]

_MEASURED: frozenset[tuple[str, Transport]] = frozenset(
    {("vllm", "ipc"), ("vllm", "nccl"), ("sglang", "ipc"), ("sglang", "nccl")}
)
"""Engines with the transports that have been measured with them on GPUs; `auto` takes no other but `folder`."""


def pick_transport(asked: Transport | Literal["auto"], placement: Placement) -> Transport:
    """Return the transport that a recipe asks for, or for `auto` the fastest that its engine and placement allow.

    Raises:
        ValueError: the transport that is asked for cannot work, or none can.
    """
    obstacles: dict[Transport, str | None] = {
        "ipc": _obstacle_to_ipc(placement),
        "nccl": _obstacle_to_nccl(placement),
        "folder": _obstacle_to_folder(placement),
    }
    free = [name for name, obstacle in obstacles.items() if obstacle is None]
    if not free:
        why = "; ".join(f"{name}: {obstacle}" for name, obstacle in obstacles.items())
        raise ValueError(f"no rollout.weight_transport can bring the actor's weights to the rollout: {why}")
    if asked == "auto":
        engine = placement["rollout"].layout.backend
        return next((name for name in free if name == "folder" or (engine, name) in _MEASURED), free[0])
    if obstacles[asked] is not None:
        raise ValueError(
            f"rollout.weight_transport={asked}, but {obstacles[asked]}: use auto, or one of {', '.join(free)}"
        )
    return asked


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


def _obstacle_to_folder(placement: Placement) -> str | None:
    """Return why the engines cannot read the files; None: they can."""
    rollout = placement["rollout"]
    if rollout.nodes_per_replica == 1:
        return None
    return (
        f"a replica is on {rollout.nodes_per_replica} nodes, and the files are in the memory of its first one: give "
        "every GPU of the rollout a rank of the actor (ipc), or the actor GPUs of its own (nccl)"
    )


def _obstacle_to_stages(placement: Placement) -> str | None:
    layout = placement["rollout"].layout
    if layout.backend == "sglang" and layout.pp > 1:
        return f"SGLang takes weights on GPUs without pipeline stages, and the rollout has p{layout.pp}"
    return None
