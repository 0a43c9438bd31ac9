"""A server's process: it ends with its parent and takes its own processes along, and its status is passed on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from fivefold.rollout.servers.client import HttpClient
from fivefold.rollout.servers.process import GUARD, ServerProcess, free_port
from tests.unit.rollout import fake_server
from tests.unit.rollout.fake_server import Log, write_python

MODULE = "sglang.launch_server"
WITH_CHILD = {fake_server.HAS_CHILD: "1"}
"""A server that starts a process which SIGTERM does not end."""
HOLDER = """
import sys, time
from fivefold.rollout.servers.client import HttpClient
from fivefold.rollout.servers.process import ServerProcess
port, *command = sys.argv[1:]
server = ServerProcess(command, {})
server.wait_until_ready(HttpClient(int(port), 1))
print("ready", flush=True)
time.sleep(300)
"""


def command_at(folder: Path, port: int, **environment: str) -> list[str]:
    python = write_python(folder, **environment)
    options = f"--host 127.0.0.1 --port {port} --max-running-requests 4"
    return [python, "-m", MODULE, *options.split()]


def pids_of(folder: Path) -> list[int]:
    """Server, its child, and its guard."""
    [row] = Log(folder).rows("start")
    return [row["pid"], row["child"], row["parent"]]


def alive(pids: Sequence[int]) -> list[int]:
    def runs(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return [pid for pid in pids if runs(pid)]


def assert_gone(pids: Sequence[int], within_s: float = 8.0) -> None:
    deadline = time.monotonic() + within_s
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = alive(pids)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


def test_a_server_ends_with_a_process_that_is_killed(tmp_path: Path) -> None:
    port = free_port()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(port), *command_at(tmp_path, port, **WITH_CHILD)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "ready\n"
    pids = pids_of(tmp_path)
    assert alive(pids) == pids
    holder.kill()
    holder.wait()
    holder.stdout.close()
    assert_gone(pids)


# Several attempts: the guard must end the server's processes whichever of its threads is faster.
@pytest.mark.parametrize("attempt", range(3))
def test_close_ends_a_server_and_its_processes(attempt: int, tmp_path: Path) -> None:
    port = free_port()
    server = ServerProcess(command_at(tmp_path, port, **WITH_CHILD), {})
    server.wait_until_ready(HttpClient(port, 1))
    pids = pids_of(tmp_path)
    assert alive(pids) == pids
    server.close()
    assert_gone(pids, within_s=1.0)
    server.close()


def test_the_processes_of_a_server_that_dies_end_too(tmp_path: Path) -> None:
    port = free_port()
    server, http = ServerProcess(command_at(tmp_path, port, **WITH_CHILD), {}), HttpClient(port, 1)
    server.wait_until_ready(http)
    body: dict[str, Any] = {"input_ids": [fake_server.DEADLY], "sampling_params": {"stop": []}}
    with pytest.raises(RuntimeError, match="the connection to the server broke during /generate"):
        http.post("/generate", body)
    assert_gone(pids_of(tmp_path))
    with pytest.raises(RuntimeError, match=f"the server ended with status {fake_server.STATUS_IN_REQUEST}; its own"):
        server.check(wait_s=8.0)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("raise SystemExit(9)", 9),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL),
    ],
)
def test_the_guard_passes_the_status_on(code: str, status: int) -> None:
    guard = subprocess.Popen(
        [sys.executable, "-P", str(GUARD), sys.executable, "-c", code], stdin=subprocess.PIPE, start_new_session=True
    )
    assert guard.wait(timeout=20) == status


def test_a_server_inherits_variables_and_gets_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "here")
    monkeypatch.setenv("CHANGED", "before")
    port = free_port()
    server = ServerProcess(command_at(tmp_path, port), {"CHANGED": "after"})
    server.wait_until_ready(HttpClient(port, 1))
    [row] = Log(tmp_path).rows("start")
    server.close()
    assert (row["environment"]["KEPT"], row["environment"]["CHANGED"]) == ("here", "after")


def test_a_refusal_of_the_server_is_an_error(tmp_path: Path) -> None:
    port = free_port()
    server, http = ServerProcess(command_at(tmp_path, port), {}), HttpClient(port, 1)
    assert not http.is_healthy()
    server.wait_until_ready(http)
    with pytest.raises(RuntimeError, match=r"the server refused /nowhere with status 404: .*Not Found"):
        http.post("/nowhere")
    assert http.post("/release_memory_occupation") is None
    server.close()
