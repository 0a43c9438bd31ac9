"""Sessions over the nodes of a pretend cluster: who runs where, and the errors when something is missing or ends."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.nodes.cluster import ROOT, PretendCluster

DRIVER = [sys.executable, "-m", "tests.nodes.driver"]
HOSTS = [f"127.0.0.{index}" for index in range(2, 6)]


def drive(cluster: PretendCluster, folder: Path, case: str, *before: str) -> dict[str, Any]:
    """Run a case of the driver; `before` is a command that runs the driver's command."""
    command = [*before, *DRIVER, cluster.address, str(folder), case]
    done = subprocess.run(command, env=cluster.environment, capture_output=True, text=True, cwd=ROOT, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_both_commands_of_areal_for_32_gpus_start_all_processes_where_they_belong(
    cluster: PretendCluster, tmp_path: Path
) -> None:
    told = drive(cluster, tmp_path, "areal")
    assert told["same"]
    assert told["free"] == [0, 0, 0, 0]
    rollout, actor = told["homes"]["rollout"], told["homes"]["actor"]
    assert [home["host"] for home in rollout] == [HOSTS[0], HOSTS[0], HOSTS[1], HOSTS[1]]
    for first, second in (rollout[:2], rollout[2:]):
        devices = [home["CUDA_VISIBLE_DEVICES"].split(",") for home in (first, second)]
        assert [len(names) for names in devices] == [4, 4]
        assert len({*devices[0], *devices[1]}) == 8
    assert [home["RANK"] for home in actor] == [str(rank) for rank in range(16)]
    assert {home["WORLD_SIZE"] for home in actor} == {"16"}
    assert [home["host"] for home in actor] == [HOSTS[2]] * 8 + [HOSTS[3]] * 8
    assert len({(home["host"], home["CUDA_VISIBLE_DEVICES"]) for home in actor}) == 16
    for axis, size in (("tp", 2), ("cp", 2), ("ep", 4)):
        assert len(told["groups"][axis]) == 16 // size
        for group in told["groups"][axis]:
            assert len({actor[rank]["host"] for rank in group}) == 1, (axis, group)


def test_what_the_cluster_lacks_is_told_with_its_nodes(cluster: PretendCluster, tmp_path: Path) -> None:
    told = drive(cluster, tmp_path, "refused")
    assert "the recipe asks for 5 nodes with 8 GPUs each" in told["nodes"]
    assert "after 1 s (scheduler.wait_s) the Ray cluster has 4 of them" in told["nodes"]
    assert "the recipe asks for 4 nodes with 9 GPUs each" in told["GPUs"]
    for message in told.values():
        for host in HOSTS:
            assert f"  {host}: 8 GPUs, of which 8 are free; 2 CPUs\n" in message


@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], check=False).returncode != 0,
    reason="needs a mount namespace",
)
def test_nodes_that_do_not_share_the_run_folder_are_named_and_their_logs_still_read(
    cluster: PretendCluster, tmp_path: Path
) -> None:
    hide = f'mount -t tmpfs tmpfs "{tmp_path}" && exec "$0" "$@"'
    told = drive(cluster, tmp_path, "apart", "unshare", "-rm", "sh", "-c", hide)
    unseen = re.search(r"is not seen on (127.0.0.\d), (127.0.0.\d): set cluster.fileroot", told["writes"])
    assert unseen is not None
    assert f"rollout rank 1 failed in phase 'setup' on {unseen[2]}" in told["dies"]
    assert "last words" in told["dies"]


HIDES_FIVEFOLD = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name == "fivefold":
            raise ModuleNotFoundError("No module named 'fivefold'")

sys.meta_path.insert(0, Hidden())
"""
"""A module that Python imports at its start from PYTHONPATH."""


def test_a_node_without_fivefold_and_then_a_lost_head_are_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDES_FIVEFOLD)
    with PretendCluster.running(1, n_gpus=2) as cluster:
        cluster.add(2, PYTHONPATH=str(tmp_path))
        message = drive(cluster, tmp_path, "without")["message"]
        assert f"on node {HOSTS[1]} failed. Fivefold must be installed there as here" in message
        assert message.endswith("\nModuleNotFoundError: No module named 'fivefold'")
        cluster.kill(HOSTS[1])
        cluster.add(2)
        command = [*DRIVER, cluster.address, str(tmp_path), "lost"]
        driver = subprocess.Popen(command, env=cluster.environment, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert driver.stdout is not None
        assert driver.stdout.readline() == "READY\n"
        cluster.kill(HOSTS[0])
        told = json.loads(driver.communicate(timeout=60)[0])
    assert told["error"] == "NodesLost"
    assert told["message"].startswith(f"lost node {HOSTS[0]} (actor rank 0) in phase 'train'")
    assert f"{HOSTS[0]} is the head of the Ray cluster" in told["message"]
