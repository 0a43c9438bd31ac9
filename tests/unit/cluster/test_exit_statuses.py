"""A process that is started with SIGCHLD ignored still gets the exit statuses of its children."""

from __future__ import annotations

import signal
import subprocess
import sys

IGNORES = """
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
STARTS_ONE = "import subprocess, sys; print(subprocess.run([sys.executable, '-c', 'raise SystemExit(3)']).returncode)"
KEEPS = "from fivefold.cluster.interrupt import keep_exit_statuses; keep_exit_statuses();"


def status_seen(code: str) -> str:
    command = [sys.executable, "-c", IGNORES, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_an_inherited_ignored_sigchld_is_undone() -> None:
    assert status_seen(STARTS_ONE) == "0", "this kernel keeps exit statuses even if SIGCHLD is ignored"
    assert status_seen(KEEPS + STARTS_ONE) == "3"


def test_sigchld_is_not_ignored_in_tests() -> None:
    assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL
