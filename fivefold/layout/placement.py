"""Places roles on devices: where each rank runs, which roles take turns, and what wastes devices or bandwidth.

vllm[rollout]:d2t4+megatron[actor]:d4t2 on 2 nodes of 8

node 0   rollout 0-7                      "+": groups fill the nodes one after another
node 1   actor   0-7                      "|": roles take turns on the same devices
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fivefold.config.problems import RecipeError
from fivefold.config.schema.recipe import Recipe
from fivefold.layout.allocation import Allocation, RoleAllocation
from fivefold.layout.devices import device_text
from fivefold.layout.grid import Axis, rank_groups
from fivefold.layout.parallel import ParallelLayout
from fivefold.layout.recipe import recipe_allocation, recipe_devices


class Device(NamedTuple):
    """One GPU, or the slot of one CPU process."""

    node: int
    local: int
    """Index of the device on its node."""


@dataclass(frozen=True)
class RolePlacement:
    """Devices of one role: rank r runs on `devices[r]`."""

    role: str
    layout: ParallelLayout
    devices: tuple[Device, ...]

    @property
    def nodes(self) -> tuple[int, ...]:
        """Nodes of the role, in ascending order."""
        return tuple(sorted({device.node for device in self.devices}))

    @property
    def nodes_per_replica(self) -> int:
        """Number of nodes of a replica of an engine that generates; all replicas have as many (`replica_problems`)."""
        return len({device.node for device in self.devices[: self.layout.tp * self.layout.pp]})

    def straddling_groups(self, *axes: Axis) -> tuple[tuple[int, ...], ...]:
        """Return the groups of `rank_groups(layout, *axes)` that have members on more than one node."""
        groups = rank_groups(self.layout, *axes)
        return tuple(group for group in groups if len({self.devices[rank].node for rank in group}) > 1)


@dataclass(frozen=True)
class Placement:
    """The devices of all roles on `n_nodes` nodes of `n_devices_per_node` devices."""

    n_nodes: int
    n_devices_per_node: int
    """GPUs of a node; for CPU processes, the slots that the roles need."""
    is_cpu: bool
    roles: tuple[RolePlacement, ...]

    def __getitem__(self, role: str) -> RolePlacement:
        """Return the placement of `role`.

        Raises:
            KeyError: no such role. A reference model without its own backend is in the actor's processes.
        """
        found = {placed.role: placed for placed in self.roles}
        if role not in found:
            raise KeyError(f"no role {role!r} is placed; the roles are {', '.join(found)}")
        return found[role]

    def __contains__(self, role: str) -> bool:
        return any(placed.role == role for placed in self.roles)

    def sharers(self, role: str) -> tuple[str, ...]:
        """Return the roles that have a device in common with `role`; only one of them works at a time."""
        devices = set(self[role].devices)
        return tuple(placed.role for placed in self.roles if placed.role != role and devices & set(placed.devices))

    def unused(self) -> tuple[Device, ...]:
        """Return the devices that no role uses, in order."""
        used = {device for placed in self.roles for device in placed.devices}
        devices = (Device(node, local) for node in range(self.n_nodes) for local in range(self.n_devices_per_node))
        return tuple(device for device in devices if device not in used)

    def warnings(self) -> tuple[str, ...]:
        """Return a line for each thing that runs, but wastes devices or bandwidth."""
        return tuple(self._warnings())

    def _warnings(self) -> Iterator[str]:
        if not self.is_cpu and (unused := self.unused()):
            total = self.n_nodes * self.n_devices_per_node
            yield f"{len(unused)} of {total} GPUs are unused: {_runs(unused)}"
        for placed in self.roles:
            if self.is_cpu or not (groups := placed.straddling_groups("tp")):
                continue
            example = ", ".join(
                f"rank {rank} on node {placed.devices[rank].node}" for rank in (groups[0][0], groups[0][-1])
            )
            plural = "s" if len(groups) > 1 else ""
            crossing = "cross" if len(groups) > 1 else "crosses"
            yield (
                f"{len(groups)} tensor parallel group{plural} of {placed.role} {crossing} nodes ({example}): "
                "their traffic takes the network between nodes; make t divide the GPUs of a node, "
                "or let the role begin with a node"
            )


def _runs(devices: Sequence[Device]) -> str:
    """Return devices by node, with neighbours joined: `node 0: 6-7; node 1: 0`."""
    by_node: dict[int, list[int]] = {}
    for device in devices:
        by_node.setdefault(device.node, []).append(device.local)
    return "; ".join(f"node {node}: {device_text(indices)}" for node, indices in by_node.items())


def place(recipe: Recipe) -> Placement:
    """Place the roles of a recipe: `rollout`, `actor`, and `ref` if it has its own backend.

    With `cluster.n_gpus_per_node: 0` the roles are CPU processes, as many as their layouts ask for.

    Raises:
        RecipeError: layouts that cannot be read or contradict one another, or that need more GPUs than there are.
    """
    allocation, lists = recipe_allocation(recipe), recipe_devices(recipe)
    cluster = recipe.cluster
    try:
        if lists is None:
            return place_allocation(allocation, cluster.n_nodes, cluster.n_gpus_per_node)
        roles = {role.role: (role, lists[role.role]) for role in allocation.roles}
        return place_by_list(roles, cluster.n_nodes, cluster.n_gpus_per_node)
    except ValueError as error:
        raise RecipeError(recipe.experiment_name, [str(error)]) from error


def place_allocation(allocation: Allocation, n_nodes: int, n_gpus_per_node: int) -> Placement:
    """Place the groups one after another over the nodes, and the roles of a group on the same devices.

    Raises:
        AllocationError: a `d*` that the GPUs do not fill.
        ValueError: groups that need more GPUs than there are.
    """
    available = n_nodes * n_gpus_per_node
    layouts = allocation.resolve(available or None)
    sizes = [layouts[group[0].role].world_size for group in allocation.groups]
    is_cpu = n_gpus_per_node == 0
    if not is_cpu and sum(sizes) > available:
        needs = " + ".join(
            f"{size} ({'|'.join(role.role for role in group)})"
            for size, group in zip(sizes, allocation.groups, strict=True)
        )
        raise ValueError(
            f"{allocation} needs {needs} = {sum(sizes)} GPUs, "
            f"but the cluster has {n_nodes} * {n_gpus_per_node} = {available}: "
            "take smaller degrees, share devices between roles (`|`, rollout.colocate=true), or raise cluster.n_nodes"
        )
    per_node = -(-sum(sizes) // n_nodes) if is_cpu else n_gpus_per_node
    placed, start = [], 0
    for group, size in zip(allocation.groups, sizes, strict=True):
        devices = tuple(Device(*divmod(index, per_node)) for index in range(start, start + size))
        placed += [RolePlacement(role.role, layouts[role.role], devices) for role in group]
        start += size
    return Placement(n_nodes, per_node, is_cpu, tuple(placed))


def place_by_list(
    roles: Mapping[str, tuple[RoleAllocation, Sequence[int]]], n_nodes: int, n_gpus_per_node: int
) -> Placement:
    """Place each role on its list of GPUs, numbered from 0 over all nodes; `d*` is filled from the length of the list.

    Lists of different roles may overlap; those roles take turns.

    Raises:
        ValueError: a list whose length is not the number of ranks, or that names a GPU twice or one that is not there.
    """
    available = n_nodes * n_gpus_per_node
    placed = []
    for name, (role, indices) in roles.items():
        missing = [index for index in indices if not 0 <= index < available]
        if missing:
            raise ValueError(
                f"{name} is put on device {missing[0]}, "
                f"but the {n_nodes} * {n_gpus_per_node} GPUs are numbered 0 to {available - 1}: "
                "list those, or take more nodes"
            )
        if len(set(indices)) != len(indices):
            twice = next(index for index in indices if list(indices).count(index) > 1)
            raise ValueError(f"{name} is put on device {twice} twice; a device runs one rank of a role: name it once")
        layout = role.resolve(len(indices))
        if layout.world_size != len(indices):
            raise ValueError(
                f"{name}={role} has {layout.world_size} ranks, but its list has {len(indices)} devices; make them equal"
            )
        placed.append(RolePlacement(name, layout, tuple(Device(*divmod(index, n_gpus_per_node)) for index in indices)))
    return Placement(n_nodes, n_gpus_per_node, False, tuple(placed))
