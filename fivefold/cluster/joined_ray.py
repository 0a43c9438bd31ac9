"""A running Ray cluster that outlives the run, and which of its machines are lost."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

import ray

from fivefold.cluster.compat import NoDriverFolders, require_listening, signals_kept
from fivefold.cluster.nodes import Node
from fivefold.cluster.open_ray import is_open

CONNECT_S = 5.0
"""Seconds within which a machine that is not lost accepts a connection."""
LOSS_S = 1.5
"""Seconds after a worker's failure in which its node may turn out to be lost. The worker may end before the raylet."""
POLL_S = 0.1
PROBE_S = 60.0
"""Seconds that a process without a token has to reach the cluster, or to be refused."""


@dataclass(frozen=True)
class JoinedRay:
    """The cluster that this process has joined."""

    head: str
    """IP address of the head node, which keeps the cluster's records."""
    port: int
    """TCP port of the process there that keeps them, the GCS."""

    @classmethod
    def join(cls, address: str, *, require_token: bool = True) -> JoinedRay:
        """Connect to the cluster at `address`.

        Args:
            address: `auto`, or host:port.
            require_token: whether a cluster is refused that takes commands without a token.

        Raises:
            ValueError: there is none, it asks for a token that this process does not have, or it is refused.
        """
        try:
            require_listening(address)
            with signals_kept():
                ray.init(
                    address=address, log_to_driver=False, logging_level=logging.CRITICAL, job_config=NoDriverFolders()
                )
        except ConnectionError as error:
            raise ValueError(_why_not_joined(address, error)) from error
        gcs = ray.get_runtime_context().gcs_address
        if require_token and is_open(gcs, PROBE_S):
            ray.shutdown()
            raise ValueError(
                f"the Ray cluster at scheduler.address={address!r} takes commands without a token, from whoever "
                f"reaches {gcs}: start it with RAY_AUTH_MODE=token and a token on every machine (docs/cluster.md), or, "
                "if the network keeps everybody else out, set scheduler.require_token=false"
            )
        host, _, port = gcs.rpartition(":")
        return cls(host.strip("[]"), int(port))

    def has_lost_its_head(self) -> bool:
        """Return whether the head node, without which Ray works nowhere, accepts no connections any more."""
        return not _accepts(self.head, self.port)

    def lost_nodes(self, nodes: Sequence[Node]) -> list[Node]:
        """Return which of `nodes` are lost. Waits `LOSS_S` for a first one.

        Ray's process on a lost node accepts no connections, or Ray's health checks have given up on the node.
        """
        alive = {(node["NodeManagerAddress"], node["NodeManagerPort"]) for node in ray.nodes() if node["Alive"]}
        deadline = time.monotonic() + LOSS_S
        while True:
            lost = [node for node in nodes if (node.host, node.port) not in alive or not _accepts(node.host, node.port)]
            if lost or time.monotonic() > deadline:
                return lost
            time.sleep(POLL_S)


def _accepts(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=CONNECT_S).close()
    except OSError:
        return False
    return True


def _why_not_joined(address: str, error: ConnectionError) -> str:
    if "AuthenticationError" in str(error.__cause__):
        return (
            f"the Ray cluster at scheduler.address={address!r} asks for a token: set RAY_AUTH_MODE=token, and have the "
            "cluster's token in ~/.ray/auth_token or RAY_AUTH_TOKEN"
        )
    return (
        f"scheduler.type is ray, but no Ray cluster answers at scheduler.address={address!r}: start one with "
        "`ray start --head` on its first machine, or set scheduler.type=local"
    )
