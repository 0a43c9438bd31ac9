"""A Ray cluster of several nodes on this machine: each node has an address, a raylet and a folder of its own.

The nodes have the addresses 127.0.0.2, 127.0.0.3 and so on, all of which the loopback interface of Linux answers, so
that a message that names the wrong node is seen to do so. Their GPUs exist only in Ray's records. Ray is started with
the commands of docs/cluster.md, and with options that make it small.
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import psutil

from tests.e2e.documents import blocks

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "cluster.md"
HEAD = "127.0.0.2"
START_ATTEMPTS = 3
STORE_BYTES = 80_000_000
NO_SPARE_WORKERS = {"RAY_prestart_worker_first_driver": "0"}
"""Variable of nodes that start workers when they are asked for, and not one for each CPU as soon as a driver joins."""
AGENTS_PORT = 52365
"""The port of Ray's own that Linux may give out as a free one. A node that has it for something else does not start."""


@dataclass
class PretendNode:
    """One node: a `ray start --block` with all its processes."""

    host: str
    folder: Path
    process: subprocess.Popen[bytes]

    def has_started(self) -> bool:
        """Return whether the node starts. On a busy machine, Ray gives up after 30 seconds."""
        output = self.folder / "output.log"
        while self.process.poll() is None:
            if "Ray runtime started" in output.read_text():
                return True
            time.sleep(0.1)
        return False

    def kill(self) -> None:
        """End the node's raylet and its workers with SIGKILL, the raylet first, as if the machine had lost power."""
        doomed = [*self._processes()]
        doomed.sort(key=lambda process: "raylet" not in process.name())
        for process in doomed:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(doomed, timeout=10)
        self.process.wait()

    def _processes(self) -> Iterator[psutil.Process]:
        try:
            shell = psutil.Process(self.process.pid)
            yield from shell.children(recursive=True)
            yield shell
        except psutil.NoSuchProcess:
            return


@dataclass
class PretendCluster:
    """The nodes. A driver joins with `environment` at `address`."""

    folder: Path
    port: int
    token: str
    nodes: list[PretendNode] = field(default_factory=list)
    _hosts: set[str] = field(default_factory=set)
    """Addresses of `nodes`, and of those that are starting."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    @contextmanager
    def running(cls, n_nodes: int, n_gpus: int) -> Iterator[Self]:
        """Start `n_nodes` nodes of `n_gpus` pretend GPUs each; all of them end with the block."""
        cluster = cls(Path(tempfile.mkdtemp(prefix="nodes-", dir="/tmp")), free_port(), secrets.token_hex(32))
        try:
            cluster.add(n_gpus)
            with ThreadPoolExecutor() as threads:
                list(threads.map(cluster.add, [n_gpus] * (n_nodes - 1)))
            yield cluster
        finally:
            with ThreadPoolExecutor() as threads:
                list(threads.map(PretendNode.kill, cluster.nodes))
            shutil.rmtree(cluster.folder, ignore_errors=True)

    @property
    def address(self) -> str:
        """Address of the head, for `scheduler.address`."""
        return f"{HEAD}:{self.port}"

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables of the nodes and of a driver."""
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.token,
            "RAY_raylet_start_wait_time_s": "90",
            **NO_SPARE_WORKERS,
            "OMP_NUM_THREADS": "1",
        }

    def kill(self, host: str) -> None:
        """End the node at `host` as if its machine had lost power."""
        (node,) = (node for node in self.nodes if node.host == host)
        node.kill()
        self.nodes.remove(node)
        self._hosts.remove(host)

    def add(self, n_gpus: int, **variables: str) -> PretendNode:
        """Start one more node, the first as head, at the first address that no other has, with further variables."""
        with self._lock:
            host = next(host for index in range(2, 255) if (host := f"127.0.0.{index}") not in self._hosts)
            self._hosts.add(host)
        folder = Path(tempfile.mkdtemp(prefix=f"{host.rpartition('.')[2]}-", dir=self.folder))
        head, other = (line for line in blocks(PAGE, "bash")[0].splitlines() if line.startswith("ray start"))
        line = (head if host == HEAD else other).replace("10.0.0.1", HEAD).replace("6379", str(self.port))
        command = [str(Path(sys.executable).with_name("ray")), *shlex.split(line)[1:], *small(host, n_gpus, folder)]
        for _ in range(START_ATTEMPTS):
            with (folder / "output.log").open("wb") as log:
                process = subprocess.Popen(
                    command, stdout=log, stderr=subprocess.STDOUT, env={**self.environment, **variables}
                )
            node = PretendNode(host, folder, process)
            if node.has_started():
                self.nodes.append(node)
                return node
            node.kill()
        raise AssertionError((folder / "output.log").read_text())


def small(host: str, n_gpus: int, folder: Path) -> list[str]:
    """Return the options of `ray start` for a small node at an address of its own, which runs until it is ended.

    It has no monitors, which a run does not need, and each of which takes a second of a core.
    """
    return [
        "--block", f"--node-ip-address={host}", "--num-cpus=2", f"--num-gpus={n_gpus}",
        f"--object-store-memory={STORE_BYTES}", f"--temp-dir={folder}",
        "--no-monitor", "--include-log-monitor=false",
    ]  # fmt: skip


def free_port() -> int:
    """Return a TCP port of the head that no process has at present, and that Ray does not keep for its agents."""
    port = AGENTS_PORT
    while port == AGENTS_PORT:
        with socket.socket() as held:
            held.bind((HEAD, 0))
            port = int(held.getsockname()[1])
    return port
