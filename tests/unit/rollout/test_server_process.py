"""A server's process: it ends with its parent and takes its own processes along, and its status is passed on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from fivefold.rollout.servers import place as place_module
from fivefold.rollout.servers import port as port_module
from fivefold.rollout.servers.client import HttpClient, ServerGone, ServerHangs
from fivefold.rollout.servers.place import SocketPlace, private_socket
from fivefold.rollout.servers.port import Port, claim_port, listeners
from fivefold.rollout.servers.process import GUARD, ServerProcess
from tests.rows import long
from tests.unit.rollout import fake_server
from tests.unit.rollout.fake_server import Log, write_python

SGLANG, VLLM = "fivefold_sglang", "vllm.entrypoints.openai.api_server"
LONGEST_S = 120.0
"""Most seconds that the end of a process may take, which only a failure uses up."""
WITH_CHILD = {fake_server.HAS_CHILD: "1"}
"""A server that starts a process which SIGTERM does not end."""
HOLDER = """
import sys, time
from fivefold.rollout.engines import DIALECTS
from fivefold.rollout.servers.client import HttpClient
from fivefold.rollout.servers.process import ServerProcess
_, backend, *words = sys.argv
place = DIALECTS[backend].place()
server = ServerProcess([word.replace("ADDRESS", str(place.address)) for word in words], {}, [place])
server.wait_until_ready(HttpClient(place.address, 1, limit_s=120))
print(place.address, flush=True)
time.sleep(1000)
"""


def command_at(folder: Path, port: int | str, module: str = SGLANG, **environment: str) -> list[str]:
    python = write_python(folder, **environment)
    return [python, "-m", module, "--host", "127.0.0.1", "--port", str(port)]


def command_with_socket(folder: Path, socket: Path | str, **environment: str) -> list[str]:
    return [write_python(folder, **environment), "-m", VLLM, "--uds", str(socket)]


def start(folder: Path, module: str = SGLANG, **environment: str) -> tuple[ServerProcess, HttpClient]:
    """Start a server on a port of its own, and wait until it is ready."""
    port = claim_port()
    server = ServerProcess(command_at(folder, port.number, module, **environment), {}, [port])
    http = HttpClient(port.number, 1, LONGEST_S)
    server.wait_until_ready(http)
    return server, http


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


def assert_gone(pids: Sequence[int]) -> None:
    """Check that processes that would run on for much longer end."""
    deadline = time.monotonic() + LONGEST_S
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = alive(pids)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


@pytest.mark.parametrize("backend", ["sglang", *long("vllm")])
def test_a_server_and_its_socket_end_with_a_process_that_is_killed(backend: str, tmp_path: Path) -> None:
    make = {"sglang": command_at, "vllm": command_with_socket}[backend]
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, backend, *make(tmp_path, "ADDRESS", **WITH_CHILD)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    address = holder.stdout.readline().strip()
    assert Path(address).is_socket() == (backend == "vllm")
    pids = pids_of(tmp_path)
    assert alive(pids) == pids
    # As Ray does, which kills what a worker has started before it kills the worker.
    for started in psutil.Process(holder.pid).children():
        started.kill()
    holder.kill()
    holder.wait()
    holder.stdout.close()
    assert_gone(pids)
    assert not Path(address).exists()


def test_a_server_that_does_not_answer_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fivefold.rollout.servers.client.HEALTH_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert not HttpClient(silent.getsockname()[1], 1, LONGEST_S).is_healthy()


def test_a_server_that_takes_no_connection_hangs(tmp_path: Path) -> None:
    """Its queue is full. As Linux does not tell that from a busy server, only the time does."""
    said: list[str] = []

    def ask(http: HttpClient) -> None:
        said.append(f"well: {http.is_healthy(0.2)}")
        try:
            http.post("/beat")
        except ServerHangs as hang:
            said.append(str(hang))

    address = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as first:
        silent.bind(str(address))
        silent.listen(0)
        first.connect(str(address))
        asking = threading.Thread(target=ask, args=(HttpClient(address, 1, 0.3),), daemon=True)
        asking.start()
        asking.join(LONGEST_S)
    assert said == ["well: False", "the server did not reply to /beat within 0.3 s"]


def listen_at_socket(folder: Path) -> tuple[SocketPlace, ServerProcess, HttpClient]:
    place = private_socket()
    server = ServerProcess(command_with_socket(folder, str(place.address)), {}, [place])
    http = HttpClient(place.address, 1, LONGEST_S)
    assert not http.is_healthy()
    server.wait_until_ready(http)
    return place, server, http


def test_a_socket_is_reached_by_its_user_alone_and_goes_with_its_server(tmp_path: Path) -> None:
    place, server, http = listen_at_socket(tmp_path)
    assert place.folder.stat().st_mode & 0o777 == 0o700
    other = private_socket()
    assert place.folder.exists(), "another server's start has removed it"
    assert http.get("/version") == {"version": "0.25.1"}
    server.close()
    assert not place.folder.exists()
    other.private.remove()


@pytest.fixture
def own_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sockets of this test alone, whose path is short: servers of other tests remove what is abandoned in theirs."""
    with tempfile.TemporaryDirectory(dir=place_module.short_folder()) as folder:
        monkeypatch.setattr(place_module, "short_folder", lambda: Path(folder))
        yield


@pytest.mark.usefixtures("own_folder")
def test_a_socket_whose_guard_is_killed_goes_with_the_next_servers_start(tmp_path: Path) -> None:
    place, server, http = listen_at_socket(tmp_path)
    [row] = Log(tmp_path).rows("start")
    for pid in (row["parent"], row["pid"]):
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="the server ended"):
        server.check(wait_s=LONGEST_S)
    with pytest.raises(ServerGone, match="broke during /version"):
        http.get("/version")
    assert place.folder.exists()
    private_socket().private.remove()
    assert not place.folder.exists()


def test_a_temporary_folder_whose_path_is_too_long_for_sockets_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("a" * 100)
    long.mkdir()
    monkeypatch.setattr(place_module, "short_folder", lambda: long)
    with pytest.raises(ValueError, match=r"a path of \d+ bytes, and sockets take 107: set TMPDIR"):
        private_socket()
    assert list(long.iterdir()) == []


# Several attempts: the guard must end the server's processes whichever of its threads is faster.
@pytest.mark.parametrize("attempt", range(3))
def test_close_ends_a_server_and_its_processes(attempt: int, tmp_path: Path) -> None:
    server, _ = start(tmp_path, **WITH_CHILD)
    pids = pids_of(tmp_path)
    assert alive(pids) == pids
    server.close()
    assert alive(pids) == []
    server.close()


def test_the_processes_of_a_server_that_dies_end_too(tmp_path: Path) -> None:
    server, http = start(tmp_path, **WITH_CHILD)
    body: dict[str, Any] = {"input_ids": [fake_server.DEADLY], "sampling_params": {"stop": []}}
    with pytest.raises(RuntimeError, match="the connection to the server broke during /generate"):
        http.post("/generate", body)
    assert_gone(pids_of(tmp_path))
    with pytest.raises(RuntimeError, match=f"the server ended with status {fake_server.STATUS_IN_REQUEST}; its own"):
        server.check(wait_s=LONGEST_S)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("raise SystemExit(9)", 9),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL),
    ],
)
def test_the_guard_passes_the_status_on(code: str, status: int) -> None:
    guard = subprocess.Popen(
        [sys.executable, "-P", str(GUARD), "", sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    assert guard.wait(timeout=LONGEST_S) == status


def test_a_server_inherits_variables_and_gets_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "here")
    monkeypatch.setenv("CHANGED", "before")
    port = claim_port()
    server = ServerProcess(command_at(tmp_path, port.number), {"CHANGED": "after"}, [port])
    server.wait_until_ready(HttpClient(port.number, 1, LONGEST_S))
    [row] = Log(tmp_path).rows("start")
    server.close()
    assert (row["environment"]["KEPT"], row["environment"]["CHANGED"]) == ("here", "after")


def test_a_refusal_of_the_server_is_an_error(tmp_path: Path) -> None:
    port = claim_port()
    server, http = ServerProcess(command_at(tmp_path, port.number), {}, [port]), HttpClient(port.number, 1, LONGEST_S)
    assert not http.is_healthy()
    server.wait_until_ready(http)
    with pytest.raises(RuntimeError, match=r"the server refused /nowhere with status 404: .*Not Found"):
        http.post("/nowhere")
    assert http.post("/release_memory_occupation") is None
    server.close()


def claim_first_of(monkeypatch: pytest.MonkeyPatch, numbers: Sequence[int]) -> Port:
    """Claim a port where these are found free, one after the other."""
    with monkeypatch.context() as patched:
        found = iter(numbers)
        patched.setattr(port_module, "_free_port", lambda: next(found))
        return claim_port()


def test_a_port_belongs_to_a_server_from_before_its_start_until_after_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, others = claim_port(), [claim_port() for _ in range(2)]
    numbers = [port.number, *(other.number for other in others)]
    assert len(set(numbers)) == 3
    for other in others:
        other.claim.close()
    before_its_start = claim_first_of(monkeypatch, numbers)
    before_its_start.claim.close()
    server = ServerProcess(command_at(tmp_path, port.number, VLLM), {}, [port])
    server.wait_until_ready(HttpClient(port.number, 1, LONGEST_S))
    while_it_runs = claim_first_of(monkeypatch, numbers)
    server.close()
    after_its_end = claim_first_of(monkeypatch, numbers)
    for claimed in (while_it_runs, after_its_end):
        claimed.claim.close()
    claimed_numbers = [claimed.number for claimed in (before_its_start, while_it_runs, after_its_end)]
    assert claimed_numbers == [numbers[1], numbers[1], numbers[0]]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_process_that_listens_on_a_servers_port_is_an_error(is_first: bool, tmp_path: Path) -> None:
    """Both bind with SO_REUSEPORT, so that each of them gets some of the requests."""
    port = claim_port()
    own, others = (command_at(tmp_path / whose, port.number, VLLM) for whose in ("own", "others"))
    if is_first:
        other = listening(others, port.number)
        server = ServerProcess(own, {}, [port])
    else:
        server = ServerProcess(own, {}, [port])
        other = listening(others, port.number)
    with pytest.raises(RuntimeError, match=rf"^process {other.pid} \(.*\) listens on port {port.number}, which"):
        server.wait_until_ready(HttpClient(port.number, 1, LONGEST_S))
    with pytest.raises(RuntimeError, match="the server ended"):
        server.check()
    other.kill()
    other.wait()


def test_a_server_that_begins_to_listen_while_processes_are_listed_is_no_stranger(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such a list has the server's socket, and no process with it."""
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        own.listen()
        number = own.getsockname()[1]
        list_all = psutil.net_connections
        lists = iter([lambda kind: [each._replace(pid=None) for each in list_all(kind)], list_all])
        monkeypatch.setattr(psutil, "net_connections", lambda kind: next(lists)(kind))
        assert listeners(number) == {os.getpid()}
        assert next(lists, None) is None


def listening(command: Sequence[str], number: int) -> subprocess.Popen[bytes]:
    """Start a process; return it once it listens on a port."""
    process = subprocess.Popen(command)
    while process.pid not in listeners(number):
        time.sleep(0.05)
    return process
