"""A machine on which Ray would hang is refused before Ray starts."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fivefold.cluster import machine
from fivefold.cluster.machine import check_machine, writable_home

HOME_OF_A_CHILD = "import os; print(os.path.expanduser('~'), os.environ.get('HF_HOME'))"


def test_too_few_open_files_are_refused() -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

    command = [sys.executable, "-c", "from fivefold.cluster.machine import check_machine; check_machine()"]
    done = subprocess.run(command, preexec_fn=limit, capture_output=True, text=True)
    assert "ValueError: a process may have 64 files open here (`ulimit -Hn`), but" in done.stderr


def test_a_loopback_interface_that_is_down_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_machine()
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    connect = socket.create_connection
    # Nobody listens at this port: the connection fails as it does if the interface is down.
    monkeypatch.setattr(machine.socket, "create_connection", lambda _, timeout: connect(("127.0.0.1", port), timeout))
    with pytest.raises(ValueError, match=r"cannot reach each other at 127.0.0.1 \(.*refused.*ip link set lo up"):
        check_machine()


@pytest.mark.parametrize("has_models", [True, False])
def test_processes_get_a_home_folder_that_they_can_write_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_models: bool
) -> None:
    models = tmp_path / "cache" / "huggingface"
    if has_models:
        models.mkdir(parents=True)
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(models.parent))
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))  # not even root can write to this folder
    with writable_home(tmp_path / "instead"):
        command = [sys.executable, "-c", HOME_OF_A_CHILD]
        seen = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert seen == [str(tmp_path / "instead"), str(models) if has_models else "None"]
    assert os.environ["HOME"] == str(tmp_path / "file")
    assert "HF_HOME" not in os.environ


def test_a_home_folder_that_can_be_written_to_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with writable_home(tmp_path / "instead"):
        assert os.environ["HOME"] == str(tmp_path)
