"""Names, ports and proxies, by which the processes of a run find each other."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

import psutil

from fivefold.cluster.open_ray import is_open
from fivefold.doctor.finding import NOTHING_TO_DO, Finding

RAY_PORT = 6379
"""Port on which the head of a Ray cluster listens by default."""
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
FEW_PORTS = 1000
INFINIBAND = Path("/sys/class/infiniband")
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
CONNECT_TIMEOUT_S = 2.0
PROBE_S = 10.0
"""Seconds that a cluster has to say whether it asks for a token."""


def check_network(environment: Mapping[str, str] = os.environ) -> list[Finding]:
    """Examine the network of this machine.

    Args:
        environment: variables that name proxies and a Ray cluster.
    """
    name = socket.gethostname()
    listening = _listens(RAY_PORT)
    takes_all = listening and is_open(f"127.0.0.1:{RAY_PORT}", PROBE_S)
    return [
        check_loopback(),
        check_host_name(name, resolves(name)),
        check_ray_address(environment.get("RAY_ADDRESS"), listening=listening, takes_all=takes_all),
        *check_proxies(environment),
        check_addresses(_addresses(), _adapters(), _port_range()),
    ]


def check_loopback() -> Finding:
    """Check whether two processes of this machine can open a port and connect to it."""
    name = "ports"
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        return Finding(name, "problem", f"127.0.0.1: {error}", "bring the loopback up: ip link set lo up")
    return Finding(name, "ok", "free ports on 127.0.0.1 accept connections", NOTHING_TO_DO)


def resolves(name: str) -> bool:
    """Say whether `name` has an address."""
    try:
        return bool(socket.getaddrinfo(name, None))
    except OSError:
        return False


def check_host_name(name: str, resolvable: bool) -> Finding:
    """Check the host's name, whose address gloo looks up unless an interface is set."""
    if resolvable:
        return Finding("host name", "ok", f"{name} has an address", NOTHING_TO_DO)
    fix = f"runs on one machine work; for several nodes add '<address> {name}' to /etc/hosts"
    return Finding("host name", "warning", f"{name} has no address", fix)


def check_ray_address(address: str | None, *, listening: bool, takes_all: bool = False) -> Finding:
    """Check whether there is a Ray cluster to join."""
    join = "scheduler.type=ray joins it"
    if address:
        return Finding("Ray cluster", "ok", f"RAY_ADDRESS={address}", join)
    if takes_all:
        fix = "start it with RAY_AUTH_MODE=token (docs/cluster.md), or set scheduler.require_token=false"
        return Finding("Ray cluster", "warning", f"the one on port {RAY_PORT} takes commands without a token", fix)
    if listening:
        return Finding("Ray cluster", "ok", f"something listens on port {RAY_PORT}", join)
    return Finding("Ray cluster", "ok", "none here", "for several nodes: ray start --head")


def check_proxies(environment: Mapping[str, str]) -> list[Finding]:
    """Check that no proxy is used between the processes of this machine, which keeps Ray from starting."""
    values = {name.lower(): value for name, value in environment.items() if value}
    proxies = [name for name in PROXIES if name in values]
    if not proxies:
        return []
    exempt = {entry.strip() for entry in values.get("no_proxy", "").split(",")}
    if exempt & {"*", "127.0.0.1", "localhost"}:
        return [Finding("proxy", "ok", f"{', '.join(proxies)}; not for this machine", NOTHING_TO_DO)]
    fix = "Ray may not start: export no_proxy=localhost,127.0.0.1 (and the nodes' addresses)"
    return [Finding("proxy", "warning", f"{', '.join(proxies)} also for this machine", fix)]


def check_addresses(addresses: tuple[str, ...], adapters: tuple[str, ...], ports: tuple[int, int] | None) -> Finding:
    """Check how other nodes would reach this one.

    Args:
        addresses: IPv4 addresses, without the loopback's.
        adapters: names of the RDMA adapters.
        ports: first and last port that the system hands out; None: they are not known.
    """
    name = "other nodes"
    if not addresses:
        return Finding(name, "ok", "no address but the loopback's", "keep cluster.n_nodes=1")
    rdma = f"; RDMA: {', '.join(adapters[:4])}" + (" ..." if len(adapters) > 4 else "") if adapters else "; no RDMA"
    found = ", ".join(addresses[:3]) + (" ..." if len(addresses) > 3 else "") + rdma
    if ports is not None and ports[1] - ports[0] < FEW_PORTS:
        fix = f"widen {PORT_RANGE}: {ports[0]} to {ports[1]} is too few for Ray and NCCL"
        return Finding(name, "warning", found, fix)
    span = "all ports" if ports is None else f"ports {RAY_PORT} and {ports[0]}-{ports[1]}"
    return Finding(name, "ok", found, f"leave open: {span}")


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(CONNECT_TIMEOUT_S)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _addresses() -> tuple[str, ...]:
    found = [
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family is socket.AF_INET
    ]
    return tuple(address for address in found if not address.startswith("127."))


def _adapters() -> tuple[str, ...]:
    return tuple(sorted(path.name for path in INFINIBAND.iterdir())) if INFINIBAND.is_dir() else ()


def _port_range() -> tuple[int, int] | None:
    if not PORT_RANGE.is_file():
        return None
    first, last = PORT_RANGE.read_text().split()
    return int(first), int(last)
