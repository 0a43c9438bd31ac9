"""Workarounds for Ray's behaviour, each with its symptom, its cause and the condition for its removal."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import ray._private.node
import ray._private.ray_constants
import ray._private.services
import ray._private.utils
import ray._private.worker
import ray._raylet
from ray.job_config import JobConfig

from fivefold.cluster.interrupt import keep_exit_statuses

JOIN_S = 10.0
"""Seconds that a cluster has to accept a connection."""

AGENT_PORTS = (
    ray._raylet.METRICS_AGENT_PORT_NAME,
    ray._raylet.METRICS_EXPORT_PORT_NAME,
    ray._raylet.DASHBOARD_AGENT_LISTEN_PORT_NAME,
    ray._raylet.RUNTIME_ENV_AGENT_PORT_NAME,
)
"""The ports of agents that a raylet waits for."""
IDLE = """
import os, time
raylet = os.getppid()
while os.getppid() == raylet:
    time.sleep(0.5)
"""
"""A program that does nothing until its parent has ended."""

ASK_S = 0.02
"""Seconds between two questions whether a starting Ray is ready."""
START_S = 30.0
"""Seconds after which Ray itself asks on, and says why it did not start."""

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_raylet_start_wait_time_s": "90",
}
"""Settings that Ray reads only from the environment: no usage reports, no second report of an error that the driver
raises, no changes to CUDA_VISIBLE_DEVICES, no copy of the working folder under `uv run`, and 90 seconds instead of 30
for a start, which takes long on a busy machine."""


def hush() -> None:
    """Keep Ray's own output off the screen. Call it before Ray is started or joined.

    Symptom: "(raylet) A worker died or was killed ..." on the screen when a worker dies, next to our own message.
    Cause: Ray's driver prints what its cluster publishes on the error channel, whatever `log_to_driver` says.
    Remove when: `log_to_driver=False` covers that channel.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    ray._private.worker._worker_logs_enabled = False


def keep_token_private() -> None:
    """Have the Ray that this process starts ask for a token, and create one unless the user has set one.

    Symptom: every user of the machine can call the run's Ray, which runs programs as the run's user.
    Cause: some releases of Ray ask for no token by default, and the token that Ray creates is in `~/.ray/auth_token`,
        with default permissions.
    Remove when: all admitted releases ask by default, only the owner can read the file, and Ray works without it if it
        cannot be written.
    """
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    ray._raylet.Config.initialize("")  # this process has read the mode when it imported Ray


class NoDriverFolders(JobConfig):
    """A job whose workers do not import from the driver's folders first.

    Symptom: a `transformers.py` or `datasets/` in the working folder of `fivefold train` kills every worker.
    Cause: Ray puts the folder of the driver's script and the working folder at the front of the workers' `sys.path`.
        `Worker` puts the driver's own folders at its end instead.
    Remove when: an option of `ray.init` leaves them out.
    """

    def _serialize(self) -> str:
        self._py_driver_sys_path.clear()
        serialized: str = super()._serialize()
        return serialized


@contextmanager
def on_loopback() -> Iterator[None]:
    """Let a Ray that starts inside this context listen on the loopback interface only.

    Symptom: Ray's processes listen on all interfaces even for a run on one machine.
    Cause: they listen on loopback only if that is the node's address, and `ray.init` replaces a loopback address by
        the machine's network address, except on platforms where Ray cannot run on several machines.
    Remove when: `ray.init(_node_ip_address="127.0.0.1")` keeps that address.
    """
    constants = ray._private.ray_constants
    before = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def without_monitors() -> Iterator[None]:
    """Let a Ray that starts inside this context run only the processes that workers need.

    Symptom: a run on one machine has three more Python processes, which take two seconds of a core to start.
    Cause: `ray.init` starts Ray's autoscaler, its API server and its log monitor, whatever `include_dashboard` and
        `log_to_driver` say.
    Remove when: these options, or others, leave them out.
    """
    with ExitStack() as patches:
        for start in ("start_monitor", "start_api_server", "start_log_monitor"):
            patches.enter_context(mock.patch.object(ray._private.node.Node, start))
        yield


@contextmanager
def without_agents() -> Iterator[None]:
    """Let the raylet of a Ray that starts inside this context have no agents.

    Symptom: a start waits for two Python processes that import Ray, which takes each of them half a second of a core.
    Cause: the raylet starts one agent for metrics and one for runtime environments, and waits for their ports. A run
        uses neither. Ray itself writes -1 for the port of a service that is not in use, but starts the agent for that,
        and the raylet ends if it has none.
    Remove when: a raylet starts without agents.
    """
    start = ray._private.services.start_ray_process
    idle = subprocess.list2cmdline([sys.executable, "-I", "-S", "-c", IDLE])

    def start_ray_process(command: list[str], process_type: str, *arguments: Any, **options: Any) -> Any:
        if process_type == ray._private.ray_constants.PROCESS_TYPE_RAYLET:
            given = dict(option.removeprefix("--").split("=", 1) for option in command if "=" in option)
            for name in AGENT_PORTS:
                ray._raylet.persist_port(given["session_dir"], given["node_id"], name, -1)
            agents = ("--dashboard_agent_command=", "--runtime_env_agent_command=")
            command = [option for option in command if not option.startswith(agents)]
            command += [f"{agent}{idle}" for agent in agents]
        return start(command, process_type, *arguments, **options)

    with mock.patch.object(ray._private.services, "start_ray_process", start_ray_process):
        yield


@contextmanager
def asked_often() -> Iterator[None]:
    """Let a Ray that starts inside this context be used as soon as it is ready.

    Symptom: a start takes half a second longer than Ray's processes need.
    Cause: `ray.init` asks whether the raylet has registered, and sleeps for a second in C++ if it has not.
    Remove when: it waits for the registration itself.
    """
    ask = ray._private.services.get_node

    def get_node(gcs_address: str, node_id: str) -> Any:
        client = ray._raylet.GcsClient(address=gcs_address)
        end = time.monotonic() + START_S
        while not client.get_all_node_info() and time.monotonic() < end:
            time.sleep(ASK_S)
        return ask(gcs_address, node_id)

    with mock.patch.object(ray._private.services, "get_node", get_node):
        yield


@contextmanager
def signals_kept() -> Iterator[None]:
    """Keep the program's signal handlers inside the block and after it. Signals wait while Ray connects.

    Symptom: during `ray.init` and after it, SIGTERM ends the driver with code 15, or with SIGABRT and a trace. Children
        seem to end with status 0.
    Cause: `ray.init` sets handlers for SIGTERM, one in Python that exits with the signal's number and one in C++ that
        prints a trace and sets an alarm, which aborts the process three seconds later. While it connects, a signal that
        interrupts a system call aborts the process too, and so does an exception in a handler. It ignores SIGCHLD.
    Remove when: it leaves signals alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    # Ray's processes inherit this mask: closing the terminal must not end them before the run has saved.
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
    set_handler, connect = ray._private.utils.set_sigterm_handler, ray._raylet.CoreWorker
    waiting: list[int] = []

    def wait() -> None:
        for number in before:
            signal.signal(number, lambda number, frame: waiting.append(number))

    def connect_undisturbed(*arguments: Any, **options: Any) -> Any:
        wait()
        # Ray's own processes, which would inherit the mask, have been started by now.
        signal.pthread_sigmask(signal.SIG_BLOCK, before)
        try:
            return connect(*arguments, **options)
        finally:
            wait()  # replaces the handler in C++, which another thread may have run
            signal.alarm(0)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, before)

    ray._private.utils.set_sigterm_handler = lambda handler: None
    ray._raylet.CoreWorker = connect_undisturbed
    try:
        yield
    finally:
        ray._private.utils.set_sigterm_handler, ray._raylet.CoreWorker = set_handler, connect
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        keep_exit_statuses()
        for waited in waiting:
            signal.raise_signal(waited)


def require_listening(address: str) -> None:
    """Refuse the address of a Ray cluster at which nothing listens.

    Symptom: `ray.init` waits silently for minutes for a killed cluster whose address Ray still knows.
    Cause: it takes the address of the last `ray start`, and retries although nothing answers.
    Remove when: it gives up if the connection is refused.

    Raises:
        ConnectionError: nothing listens there.
    """
    found = ray._private.services.canonicalize_bootstrap_address(address)
    if found is None or "://" in found:
        return
    host, _, port = found.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=JOIN_S).close()
    except OSError as error:
        raise ConnectionError(str(error)) from error
