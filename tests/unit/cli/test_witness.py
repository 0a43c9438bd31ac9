"""The parent of a command that trains: exit codes, and signals on their way to the command."""

from __future__ import annotations

import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

ENDS = """
import ctypes, os, posix, sys
from fivefold.cli.witness import under_a_witness
print("once", flush=True)
finished = under_a_witness(1)
{code}
finished()
"""

COUNTS = """
import os, signal, time
from fivefold.cli.witness import under_a_witness
finished = under_a_witness(1)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, frame: os.write(1, f"{signal.Signals(number).name}\\n".encode()))
os.write(1, b"ready\\n")
while True:
    time.sleep(0.01)
"""

SETTLED_S = 0.6
"""Seconds after which no signal is on its way any more, once one has been printed."""
LONGEST_S = 60.0
"""Most seconds that a busy machine takes to print one."""


@pytest.mark.parametrize(
    ("code", "expected", "is_said"),
    [
        ("posix._exit(0)", 1, True),
        ("os.execv('/bin/true', ['true'])", 1, True),
        ("ctypes.CDLL(None)._exit(0)", 1, True),
        ("os.execv('/bin/false', ['false'])", 1, False),
        ("sys.exit(0)", 1, True),
        ("sys.exit(7)", 7, False),
        ("raise KeyError", 1, False),
        ("os.kill(os.getpid(), 9)", -signal.SIGKILL, False),
        ("os.kill(os.getpid(), 15)", -signal.SIGTERM, False),
        ("os.fork() or posix._exit(0)", 0, False),
        ("", 0, False),
        ("finished(); posix._exit(3)", 3, False),
    ],
)
def test_the_exit_code_is_the_commands_unless_it_is_0_before_the_end(code: str, expected: int, is_said: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDS.format(code=code)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == expected, done.stderr
    assert ("has ended with exit code 0 before the run did" in done.stderr) == is_said
    assert done.stdout == "once\n"


def test_the_first_process_of_a_container_exits_as_a_shell_would() -> None:
    first = ["unshare", "--pid", "--fork"]
    if not shutil.which("unshare") or subprocess.run([*first, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make a container")
    code = ENDS.format(code="os.kill(os.getpid(), 9)")
    done = subprocess.run([*first, sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
    assert done.returncode == 128 + signal.SIGKILL


@contextmanager
def counting(folder: Path, code: str = COUNTS) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[], list[str]]]]:
    """Start a command that prints its signals; give its parent, and a function that returns what it has printed."""
    output = folder / "output"
    with output.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=out, start_new_session=True)
    try:
        while b"ready" not in output.read_bytes():
            assert process.poll() is None
            time.sleep(0.01)
        yield process, lambda: output.read_text().splitlines()[1:]
    finally:
        process.kill()
        process.wait()


def settled(printed: Callable[[], list[str]], count: int) -> list[str]:
    """Return what has been printed, once that is `count` signals and no further one is on its way."""
    deadline = time.monotonic() + LONGEST_S
    while len(printed()) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(SETTLED_S)
    return printed()


def to_the_parent(process: subprocess.Popen[bytes], number: int) -> None:
    process.send_signal(number)


def to_the_group(process: subprocess.Popen[bytes], number: int) -> None:
    os.killpg(process.pid, number)


def to_both_in_turn(process: subprocess.Popen[bytes], number: int) -> None:
    """As timeout(1) does."""
    process.send_signal(number)
    os.killpg(process.pid, number)


@pytest.mark.parametrize("sends", [to_the_parent, to_the_group, to_both_in_turn])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_the_command_once_and_the_next_one_too(
    tmp_path: Path, sends: Callable[[subprocess.Popen[bytes], int], None], number: signal.Signals
) -> None:
    with counting(tmp_path) as (process, printed):
        for count in (1, 2):
            sends(process, number)
            assert settled(printed, count) == [number.name] * count


def test_signals_of_a_forked_process_are_not_taken_for_the_commands(tmp_path: Path) -> None:
    # A signal that comes while Python starts in the forked process is lost.
    ready = tmp_path / "ready"
    forks = COUNTS.replace("while True:", f"os.fork() or open({str(ready)!r}, 'w').close()\nwhile True:")
    with counting(tmp_path, forks) as (process, printed):
        [command] = psutil.Process(process.pid).children()
        while not ready.exists():
            time.sleep(0.01)
        forked = command.children()
        for count in (1, 2):
            forked[0].terminate()
            settled(printed, count)
        process.terminate()
        found = settled(printed, 3)
        forked[0].kill()
        assert found == ["SIGTERM"] * 3


def test_a_key_of_the_terminal_reaches_the_command_once() -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", COUNTS])
    try:
        shown = b""
        while b"ready" not in shown:
            shown += os.read(terminal, 1024)
        for _ in range(2):
            os.write(terminal, b"\x03")
            time.sleep(SETTLED_S)
        os.write(terminal, b"\x1c")  # SIGQUIT ends both
        while b"SIGINT" not in shown:
            shown += os.read(terminal, 1024)
        assert shown.count(b"SIGINT") == 2
    finally:
        os.close(terminal)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_killed_parent_takes_the_command_with_it(tmp_path: Path) -> None:
    with counting(tmp_path) as (process, _):
        [command] = psutil.Process(process.pid).children()
        process.kill()
        assert process.wait() == -signal.SIGKILL
        assert psutil.wait_procs([command], timeout=10)[0] == [command]
