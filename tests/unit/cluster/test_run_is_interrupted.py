"""A run ends whole: whoever ends it, and however, none of its processes and none of its temporary files are left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from engines import gone

DRIVER = Path(__file__).with_name("driver.py")
RECIPE = """
experiment_name: e
cluster: {n_gpus_per_node: 0}
actor: {path: nowhere}
train_dataset: {path: nowhere}
"""


@contextmanager
def run_under_way(folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """The driver in a process group of its own, as a shell starts it, and the ids of its workers, of a process that one
    of them started, and of all else under it."""
    (folder / "recipe.yaml").write_text(RECIPE)
    command = [sys.executable, str(DRIVER), "train", "recipe.yaml", f"cluster.fileroot={folder}/runs"]
    driver = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert driver.stdout is not None
        line = driver.stdout.readline()
        if not line.startswith("READY"):
            pytest.fail(f"the driver did not start: {line}{driver.communicate()[1]}")
        below = [child.pid for child in psutil.Process(driver.pid).children(recursive=True)]
        yield driver, [*map(int, line.split()[1:]), *below]
    finally:
        driver.kill()


def status(folder: Path) -> str:
    return str(json.loads((folder / "runs/e/trial-0/status.json").read_text())["state"])


def ray_folders() -> set[str]:
    return {entry.name for entry in os.scandir("/tmp") if entry.name.startswith("fivefold-")}


def test_ctrl_c(tmp_path: Path) -> None:
    before = ray_folders()
    with run_under_way(tmp_path) as (driver, pids):
        # A terminal sends it to the whole process group.
        os.killpg(driver.pid, signal.SIGINT)
        out, err = driver.communicate(timeout=30)
        assert driver.returncode == 130
        assert out == ""
        assert err.split("\n")[1] == "Interrupted: ending all processes. Once more ends them without waiting."
        assert "Saved in" in err
        assert "metrics.jsonl" in err
        assert "Traceback" not in err
        assert gone(pids)
        assert status(tmp_path) == "interrupted"
    assert ray_folders() <= before


def test_the_driver_is_killed(tmp_path: Path) -> None:
    before = ray_folders()
    with run_under_way(tmp_path) as (driver, pids):
        driver.kill()
        assert gone(pids[:3])
    for left in ray_folders() - before:
        shutil.rmtree(Path("/tmp") / left, ignore_errors=True)


def test_a_worker_is_killed(tmp_path: Path) -> None:
    with run_under_way(tmp_path) as (driver, pids):
        os.kill(pids[1], signal.SIGKILL)
        out, err = driver.communicate(timeout=30)
        assert driver.returncode == 1
        assert out == ""
        assert err.startswith("\nThe run failed: actor rank 1 failed in phase 'train'")
        assert "actor-1.log" in err
        assert "(raylet)" not in err
        assert gone(pids)
        assert status(tmp_path) == "failed"
