"""The inputs of a plan without a recipe: a model's name and a number of GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fivefold.config.limits import MOST_DEVICES
from fivefold.families.read import find_shape
from fivefold.layout.allocation import Allocation, RoleAllocation
from fivefold.layout.backends import backend_names
from fivefold.layout.devices import parse_devices
from fivefold.layout.gpus import find_gpu
from fivefold.layout.parser import parse_role
from fivefold.planning.defaults import DEFAULT_MICRO_TOKENS, DEFAULT_SEQUENCE_LENGTH, DEFAULT_SEQUENCES
from fivefold.planning.inputs import OPEN, Inputs, ModelInputs, RolloutInputs
from fivefold.planning.recipe_inputs import Changes
from fivefold.planning.workload import Workload

DEFAULT_GENERATION_BATCH = 256


def model_inputs(
    model: str,
    n_gpus: int,
    *,
    gpus_per_node: int,
    gpu: str,
    actor: str | None,
    rollout: str | None,
    devices: Sequence[str],
    changes: Changes,
) -> Inputs:
    """Return the inputs for a model on a cluster. Without a layout, the actor takes the remaining GPUs.

    Raises:
        ValueError: an unknown model or GPU, a layout or a list of devices that cannot be read.
    """
    if n_gpus < 1 or gpus_per_node < 1:
        raise ValueError(f"--gpus {n_gpus} --gpus-per-node {gpus_per_node}: both must be at least 1")
    if n_gpus > MOST_DEVICES:
        raise ValueError(f"--gpus {n_gpus}: at most {MOST_DEVICES:,} can be planned")
    per_node = min(gpus_per_node, n_gpus)
    if n_gpus % per_node:
        raise ValueError(f"--gpus {n_gpus} is not a whole number of nodes of {per_node}; give --gpus-per-node")
    shape = replace(find_shape(model), vision=None)
    length = DEFAULT_SEQUENCE_LENGTH if shape.indexer is None else min(DEFAULT_SEQUENCE_LENGTH, shape.most_tokens)
    work = changes.applied(Workload(length, DEFAULT_SEQUENCES, DEFAULT_MICRO_TOKENS))
    if shape.indexer is not None and work.sequence_length > shape.most_tokens:
        raise ValueError(f"--sequence-length {work.sequence_length}: the model {shape.limit}; lower it")
    trainer, generator = _trainer(actor), _generator(rollout)
    roles = (trainer,) if generator is None else (generator, trainer)
    lists = _device_lists(devices, {role.role for role in roles}) if devices else None
    return Inputs(
        gpu=find_gpu(gpu),
        allocation=_allocation(trainer, generator, n_gpus) if lists is None else _listed(roles, lists),
        n_nodes=n_gpus // per_node,
        gpus_per_node=per_node,
        models={"actor": ModelInputs(shape, work, leaves=OPEN)},
        rollout=RolloutInputs(batch=DEFAULT_GENERATION_BATCH, generated=work.sequences),
        devices=lists,
    )


def _trainer(backend: str | None) -> RoleAllocation:
    """Return the actor. Without a layout it takes the remaining GPUs."""
    role = RoleAllocation("megatron", dp=None) if backend is None else parse_role(backend)
    if not role.is_training:
        raise ValueError(f"--actor {backend}: {role.backend} only generates; train with {backend_names(trains=True)}")
    return replace(role, name="actor")


def _generator(backend: str | None) -> RoleAllocation | None:
    if backend is None:
        return None
    role = parse_role(backend)
    if role.is_training:
        raise ValueError(f"--rollout {backend}: {role.backend} trains; generate with {backend_names(trains=False)}")
    return replace(role, name="rollout")


def _allocation(trainer: RoleAllocation, generator: RoleAllocation | None, n_gpus: int) -> Allocation:
    """Return both roles, side by side if there are devices for both, else taking turns on the same devices."""
    if generator is None:
        return Allocation(((trainer,),))
    least = [role.replica_size if role.n_devices is None else role.n_devices for role in (trainer, generator)]
    if sum(least) <= n_gpus and (trainer.dp is not None or generator.dp is not None):
        return Allocation(((generator,), (trainer,)))
    return Allocation(((generator, trainer),))


def _device_lists(options: Sequence[str], roles: set[str]) -> dict[str, tuple[int, ...]]:
    """Return the devices of each role, from one `--devices ROLE=LIST` each."""
    lists: dict[str, tuple[int, ...]] = {}
    for option in options:
        role, _, text = option.partition("=")
        if role not in roles or role in lists:
            raise ValueError(f"--devices {option}: write ROLE=LIST once for each of {', '.join(sorted(roles))}")
        lists[role] = parse_devices(text)
    if missing := roles - lists.keys():
        raise ValueError(f"--devices gives no list for {', '.join(sorted(missing))}; give every role one, or none")
    return lists


def _listed(roles: Sequence[RoleAllocation], lists: Mapping[str, tuple[int, ...]]) -> Allocation:
    """Return the roles with every `d*` filled from the role's list. Only the lists say who shares devices."""
    return Allocation(tuple((replace(role, dp=role.resolve(len(lists[role.role])).dp),) for role in roles))
