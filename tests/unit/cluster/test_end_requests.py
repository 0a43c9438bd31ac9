"""Signals in the training loop: the first asks for the end, the second ends the process at once."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fivefold.cluster.interrupt import ending_after_a_step

PROGRAM = """
import os, signal
from fivefold.cluster.interrupt import ending_after_a_step, interruptible
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup, it is ignored
try:
    with interruptible():
        with ending_after_a_step() as request:
            assert not request.made
            os.kill(os.getpid(), signal.{first})
            assert request.made
            print("step ends", flush=True)
            if {again}:
                os.kill(os.getpid(), signal.SIGINT)
            print("saved", flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        print("never", flush=True)
except KeyboardInterrupt:
    print("outside of the loop it ends at once", flush=True)
"""
DROPPED = """
import os, signal
from fivefold.cluster.interrupt import ending_after_a_step, interruptible

class Dying:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(10):  # Python drops what the handler raises here
            pass

try:
    with interruptible():
        Dying()
        print("goes on", flush=True)
        with ending_after_a_step() as request:
            assert request.made
except KeyboardInterrupt:
    print("ends", flush=True)
"""


def run(first: str, again: bool) -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(first=first, again=again)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("first", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_the_first_signal_lets_the_step_end(first: str) -> None:
    result = run(first, again=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["step ends", "saved", "outside of the loop it ends at once"]
    assert "the run saves and ends after this step" in result.stderr


CLOSED = """
import os, signal, sys
from pathlib import Path
from fivefold.cluster.interrupt import ending_after_a_step, interruptible
signal.signal(signal.SIGHUP, signal.SIG_IGN if {ignored} else signal.SIG_DFL)  # under nohup, it is ignored
with interruptible():
    with ending_after_a_step() as request:
        print("ready", flush=True)
        sys.stdin.readline()
        for _ in range(2):  # shell and kernel
            os.kill(os.getpid(), signal.SIGHUP)
        if not {ignored}:
            print("the step ends", flush=True)
        Path({file!r}).write_text(f"{{request.made}}")
"""


@pytest.mark.parametrize("ignored", [False, True])
def test_a_terminal_that_closes_lets_the_step_end_unless_that_is_ignored(ignored: bool, tmp_path: Path) -> None:
    ours, terminal = os.openpty()
    file = tmp_path / "saved"
    program = CLOSED.format(ignored=ignored, file=str(file))
    run = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=terminal, stderr=terminal)
    with open(ours, "rb", buffering=0, closefd=False) as output:
        # To the end of the line: the terminal is closed when the program has written all of it.
        assert output.readline() == b"ready\r\n"
    os.close(terminal)
    os.close(ours)
    run.communicate(b"\n", timeout=60)
    assert run.returncode == 0
    assert file.read_text() == str(not ignored)


def test_the_step_ends_although_nobody_reads_that_it_will() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    program = PROGRAM.format(first="SIGINT", again=False)
    result = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=writer, text=True, timeout=60, check=False
    )
    os.close(writer)
    assert result.stdout.splitlines() == ["step ends", "saved", "outside of the loop it ends at once"]


def test_the_second_signal_ends_the_process_at_once() -> None:
    result = run("SIGTERM", again=True)
    assert result.returncode == 130
    assert result.stdout.splitlines() == ["step ends"]
    assert result.stderr.endswith("what was not saved is lost.\n")


def test_a_process_that_ends_at_once_gives_the_terminal_its_cursor_back() -> None:
    ours, terminal = os.openpty()
    program = PROGRAM.format(first="SIGINT", again=True)
    environment = {**os.environ, "TERM": "xterm-256color"}
    ended = subprocess.run(
        [sys.executable, "-c", program], stdout=terminal, stderr=terminal, env=environment, timeout=60, check=False
    )
    shown = os.read(ours, 10_000)
    os.close(terminal)
    os.close(ours)
    assert ended.returncode == 130
    assert b"\x1b[?25h" in shown.partition(b"step ends")[2]


def test_a_request_whose_exception_python_drops_still_ends_the_run() -> None:
    result = subprocess.run([sys.executable, "-c", DROPPED], capture_output=True, text=True, timeout=60, check=False)
    assert result.stdout.splitlines() == ["goes on", "ends"], result.stderr


def test_a_thread_beside_the_main_one_cannot_be_asked() -> None:
    made: list[bool] = []

    def enter() -> None:
        with ending_after_a_step() as request:
            made.append(request.made)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert made == [False]
