"""The processes of replicas that generate, and those on the further nodes of replicas that lie on several nodes each.

vllm:d2t8p2 on nodes of 8

node 0   rollout 0    its server's first 8 ranks and HTTP API       node 2   rollout 1
node 1   rollout-follower 0    the other 8 ranks                    node 3   rollout-follower 1
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from fivefold.cluster.role import HOST, Role
from fivefold.cluster.session import Session
from fivefold.layout.placement import Device, Placement
from fivefold.roles.rollout_worker import RolloutWorker
from fivefold.rollout.engines import DIALECTS
from fivefold.rollout.replica import FollowerAddress, ReplicaSpec
from fivefold.rollout.servers.follower import FollowerHost


def launch_followers(
    session: Session, placement: Placement, spec: ReplicaSpec, name: str = "rollout"
) -> list[tuple[FollowerAddress, ...]]:
    """Start a process on each node of each replica of a role but its first one, which waits for that one.

    Returns:
        Where they are reached, by replica; nothing if all replicas are on one node.
    """
    nodes = _replica_nodes(placement, name)
    devices = [device for replica in nodes for node in replica[1:] for device in node]
    if not devices:
        return []
    role = Role(f"{name}-follower", devices, _follow, (spec,), devices_per_process=len(nodes[0][0]))
    addresses = session.launch(role)[role.name].call(FollowerHost.address)
    n = len(nodes[0]) - 1
    return [tuple(addresses[first : first + n]) for first in range(0, len(addresses), n)]


def rollout_role(
    placement: Placement, spec: ReplicaSpec, followers: Sequence[tuple[FollowerAddress, ...]], name: str = "rollout"
) -> Role:
    """Return the role of a role's replicas, each with the followers that `launch_followers` has started for it."""
    nodes = _replica_nodes(placement, name)
    devices = [device for replica in nodes for device in replica[0]]
    return Role(name, devices, RolloutWorker, (spec, followers), devices_per_process=len(nodes[0][0]))


def _replica_nodes(placement: Placement, name: str) -> list[list[tuple[Device, ...]]]:
    """Return the devices of each node of each replica."""
    placed = placement[name]
    n = placed.nodes_per_replica
    size = placed.layout.tp * placed.layout.pp // n
    parts = [placed.devices[first : first + size] for first in range(0, len(placed.devices), size)]
    return [parts[first : first + n] for first in range(0, len(parts), n)]


def _follow(spec: ReplicaSpec) -> FollowerHost:
    return FollowerHost(DIALECTS[spec.backend], spec, os.environ[HOST])
