"""All transports of weights, and which of them a run takes.

ipc      the engine opens the trainer's buffers on the same GPU; one is filled while it loads the other
nccl     rank 0 of the trainer broadcasts its buffer to engines on other GPUs
folder   through host memory: the object store, and for servers files on the replica's node
adapter  adapters alone through the object store, and merged on the replica's node
served_adapter  likewise, and not merged: the server has them next to the weights of the model's files
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fivefold.config.problems import did_you_mean
from fivefold.config.schema.train import TrainRecipe
from fivefold.layout.backends import BACKENDS
from fivefold.layout.placement import Placement
from fivefold.weights.adapter import AdapterMemory
from fivefold.weights.host_memory import HostMemory
from fivefold.weights.ipc import IPC
from fivefold.weights.nccl import NCCL
from fivefold.weights.served_adapter import ServedAdapter
from fivefold.weights.transport import Route, Transport

_ROWS = (IPC(), NCCL(), HostMemory(), AdapterMemory(), ServedAdapter())
TRANSPORTS: Mapping[str, Transport] = {row.name: row for row in _ROWS}
"""Every transport by its name, the fastest first."""


def transport_problems(recipe: TrainRecipe) -> Iterator[str]:
    """Yield a line if a recipe asks for a transport that does not exist or cannot work with it."""
    asked = recipe.rollout.weight_transport
    yield from _name_problems(asked)
    if asked in TRANSPORTS:
        yield from TRANSPORTS[asked].unfit(recipe)


def _name_problems(asked: str) -> Iterator[str]:
    names = ["auto", *TRANSPORTS]
    if asked not in names:
        yield f"rollout.weight_transport={asked} is none of {', '.join(names)}{did_you_mean(asked, names)}"


def pick(asked: str, placement: Placement) -> Transport:
    """Return the transport that a recipe asks for; for `auto`, the fastest that its engine and placement allow.

    Raises:
        ValueError: the transport does not exist or cannot work, or none can.
    """
    for problem in _name_problems(asked):
        raise ValueError(problem)
    obstacles = {name: transport.obstacle(placement) for name, transport in TRANSPORTS.items()}
    free = [name for name, obstacle in obstacles.items() if obstacle is None]
    if not free:
        why = "; ".join(f"{name}: {obstacle}" for name, obstacle in obstacles.items())
        raise ValueError(f"no rollout.weight_transport can bring the actor's weights to the rollout: {why}")
    if asked == "auto":
        engine = placement["rollout"].layout.backend
        return TRANSPORTS[next((name for name in free if TRANSPORTS[name].suits(engine)), free[0])]
    if obstacles[asked] is not None:
        raise ValueError(
            f"rollout.weight_transport={asked}, but {obstacles[asked]}: use auto, or one of "
            + ", ".join(name for name in free if not TRANSPORTS[name].sends_adapters)
        )
    return TRANSPORTS[asked]


def choose_route(recipe: TrainRecipe, placement: Placement) -> Route:
    """Return the route of a recipe's weights.

    Raises:
        ValueError: as `pick`; or nothing can check what arrives, or training cannot overlap the transfer as asked.
    """
    for problem in transport_problems(recipe):
        raise ValueError(problem)
    transport = pick(recipe.rollout.weight_transport, placement).fitted(recipe)
    engine = BACKENDS[placement["rollout"].layout.backend]
    if recipe.rollout.verify_weights and not engine.reports_checksum:
        raise ValueError(
            f"rollout.verify_weights=true compares what arrived, which {engine.title} does not report: drop it, or use "
            "vllm"
        )
    asked, obstacle = recipe.rollout.overlap_weight_sync, _obstacle_to_overlap(recipe, placement)
    if asked and obstacle is not None:
        raise ValueError(f"rollout.overlap_weight_sync=true, but {obstacle}: set it to null")
    return Route(
        transport,
        recipe.rollout.dtype or recipe.actor.dtype,
        recipe.rollout.verify_weights,
        readers=transport.readers(placement),
        n_receivers=len(placement["rollout"].devices) if transport.is_collective else 0,
        overlaps_training=obstacle is None and overlaps(transport, asked=asked),
    )


def overlaps(transport: Transport, *, asked: bool | None) -> bool:
    """Return whether training overlaps the transfer where nothing hinders it.

    By default it does if the items are a copy already. Other transports need one, and broadcasts in parallel with
    training have not been measured on GPUs.
    """
    return transport.carries_weights if asked is None else asked


def _obstacle_to_overlap(recipe: TrainRecipe, placement: Placement) -> str | None:
    """Return why the trainer waits until the engines have its weights; None: it need not."""
    if recipe.rollout.max_head_offpolicyness == 0:
        return "with max_head_offpolicyness=0 the next step begins with samples of these weights"
    if placement.sharers("rollout"):
        return "the rollout shares devices with other roles, which work in turn"
    return None
