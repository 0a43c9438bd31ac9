"""The self-test: two processes agree with one, and a process that fails or hangs is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fivefold.doctor import self_test
from fivefold.doctor.self_test import Member, compare, failure, run_self_test


def ended(folder: Path, progress: str, code: str) -> Member:
    (folder / "progress").write_text(progress)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-S", "-c", code], stderr=log)
    process.wait()
    return Member("process 1 of 2", process, folder / "progress", folder / "log")


def test_equal_losses_are_ok_and_different_ones_are_a_problem() -> None:
    assert compare((4.0, 3.9), [(4.00001, 3.90001)] * 2, "cpu", 9.0).status == "ok"
    for other in ((4.1, 3.9), (4.0, 4.0), (float("nan"), 3.9)):
        finding = compare((4.0, 3.9), [(4.0, 3.9), other], "cuda", 9.0)
        assert finding.status == "problem"
        assert len(finding.details) == 3


def test_a_failed_process_is_named_with_its_phase_and_its_last_words(tmp_path: Path) -> None:
    member = ended(tmp_path, '{"phase": "import"}\n{"phase": "join"}\n', "raise OSError('no interface')")
    finding = failure(member, "cpu", None)
    assert finding.status == "problem"
    assert "process 1 of 2 failed in phase 'join'" in finding.found
    assert "GLOO_SOCKET_IFNAME" in finding.advice
    assert "NCCL" in failure(member, "cuda", None).advice
    assert finding.details[-1] == "OSError: no interface"


def test_a_killed_process_and_one_that_hangs_are_told_apart(tmp_path: Path) -> None:
    member = ended(tmp_path, '{"phase": "train"}\n', "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert "SIGKILL" in failure(member, "cpu", None).found
    assert "within 180 s" in failure(member, "cpu", 180.0).found


def test_processes_that_do_not_come_back_are_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sleeper = tmp_path / "sleeper"
    sleeper.write_text("#!/bin/sh\nexec sleep 60\n")
    sleeper.chmod(0o700)
    monkeypatch.setattr(self_test.sys, "executable", str(sleeper))
    finding = run_self_test(0, time_limit_s=0.3)
    assert finding.status == "problem"
    assert "in phase 'start'" in finding.found


def test_two_processes_agree_with_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('a file of the user')")
    monkeypatch.chdir(tmp_path)
    finding = run_self_test(0)
    assert finding.status == "ok", (finding, finding.details)
