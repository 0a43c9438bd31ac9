"""However a run ends, it leaves no process and no temporary file."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from engines import HANG_S, SOON_S, gone

from fivefold.observe.private_folder import PrivateFolder
from tests.rows import long

DRIVER = Path(__file__).with_name("driver.py")
RECIPE = """
experiment_name: e
cluster: {n_gpus_per_node: 0}
actor: {path: nowhere}
train_dataset: {path: nowhere}
"""


@contextmanager
def run_under_way(
    folder: Path, *overrides: str, home: str = "home"
) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Start the driver in a process group of its own, as a shell does.

    Yields it, and the ids of its workers, of a process that one of them started, and of all its other descendants.
    """
    (folder / "recipe.yaml").write_text(RECIPE)
    # Workers import a package of this name, and must not get the user's file instead.
    (folder / "fivefold.py").write_text("raise ImportError('a file of the user')")
    (folder / "home").mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, str(DRIVER), "train", "recipe.yaml", f"cluster.fileroot={folder}/runs", *overrides]
    driver = subprocess.Popen(
        command,
        cwd=folder,
        env=environment | {"HOME": str(folder / home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
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


def ray_server(driver: subprocess.Popen[str], name: str) -> psutil.Process:
    """Return a process of this driver's Ray. One of an attempt to start Ray that took too long has ended."""
    below = psutil.Process(driver.pid).children(recursive=True)
    return next(child for child in below if child.name() == name and child.status() != psutil.STATUS_ZOMBIE)


def ray_folder(driver: subprocess.Popen[str]) -> Path:
    """Return the folder of this driver's Ray in the temporary directory."""
    command = " ".join(ray_server(driver, "raylet").cmdline())
    found = re.search(r"/tmp/fivefold-\w+", command)
    assert found
    return Path(found[0])


def test_ctrl_c_ends_the_run_in_order(tmp_path: Path) -> None:
    with run_under_way(tmp_path) as (driver, pids):
        folder = ray_folder(driver)
        # A terminal sends the signal to the whole process group.
        os.killpg(driver.pid, signal.SIGINT)
        out, err = driver.communicate(timeout=HANG_S)
        assert driver.returncode == 130
        assert out == ""
        assert err.split("\n")[1] == "Interrupted: ending all processes. Once more ends them without waiting."
        assert "Saved in" in err
        assert "metrics.jsonl" in err
        assert "Traceback" not in err
        assert gone(pids)
        assert status(tmp_path) == "interrupted"
    assert not folder.exists()
    # Everybody could read the token that Ray itself would leave in the home folder.
    assert not list((tmp_path / "home").iterdir())


def test_workers_end_if_the_driver_is_killed(tmp_path: Path) -> None:
    with run_under_way(tmp_path) as (driver, pids):
        workers, started = pids[:2], pids[2:4]
        left = ray_folder(driver)
        assert stat.filemode(left.stat().st_mode) == "drwx------"
        driver.kill()
        assert gone(workers)
        # Ray, which ends what they have started, is killed with the driver, and may have come to it or not.
        for pid in started:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert gone(pids)
    # The next run begins with a folder of its own, and removes the one that is left. It may be one of another test.
    deadline = time.monotonic() + SOON_S
    while left.exists() and time.monotonic() < deadline:
        PrivateFolder.create(left.parent).remove()
    assert not left.exists()


def test_a_killed_worker_ends_the_run_and_is_named(tmp_path: Path) -> None:
    # The home folder is a file here, so that nobody can write to it, not even root.
    with run_under_way(tmp_path, home="recipe.yaml") as (driver, pids):
        os.kill(pids[1], signal.SIGKILL)
        out, err = driver.communicate(timeout=HANG_S)
        assert driver.returncode == 1
        assert out == ""
        assert err.startswith("\nThe run failed: actor rank 1 failed in phase 'train'")
        assert "actor-1.log" in err
        assert "(raylet)" not in err
        assert gone(pids)
        assert status(tmp_path) == "failed"


@pytest.mark.long
def test_a_rank_that_hangs_while_others_wait_for_it_ends_the_run_within_the_bound(tmp_path: Path) -> None:
    with run_under_way(tmp_path, "trial_name=collective") as (driver, pids):
        began = time.monotonic()
        _, err = driver.communicate(timeout=HANG_S)
        # Two seconds, and what it takes to ask for stacks and to end all processes.
        assert time.monotonic() - began < SOON_S
        assert driver.returncode == 1
        assert "phase 'train' took longer than scheduler.timeout_s=2 s" in err
        assert "no answer from actor rank 0, actor rank 1" in err
        assert re.search(r"actor rank 0 is at:(\n  .*)*all_reduce", err)
        assert re.search(r"actor rank 1 is at:(\n  .*)*hang_here", err)
        assert gone(pids)


@pytest.mark.parametrize("server", ["raylet", *long("gcs_server")])
def test_a_killed_server_of_ray_ends_the_run_and_is_named(tmp_path: Path, server: str) -> None:
    with run_under_way(tmp_path) as (driver, pids):
        ray_server(driver, server).kill()
        _, err = driver.communicate(timeout=HANG_S)
        assert driver.returncode == 1
        assert f"Ray itself ended on this machine in phase 'train': its process {server} was killed by SIGKILL" in err
        assert "Out of memory" in err
        assert "actor rank" not in err
        assert (tmp_path / "runs/e/trial-0/logs/ray" / f"{server}.out").is_file()
        assert gone(pids)
        assert status(tmp_path) == "failed"
