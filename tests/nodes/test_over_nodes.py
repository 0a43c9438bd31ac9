"""Sessions and runs over the nodes of one pretend cluster: who runs where, and what a loss or a lack leads to.

A session's errors name what is missing or has ended. A server is on two nodes, and a training goes on after a loss.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.conftest import COMMAND
from tests.nodes.cluster import ROOT, PretendCluster
from tests.unit.rollout.fake_server import Log, write_python

pytestmark = pytest.mark.long

Row = Mapping[str, Any]

DRIVER = [sys.executable, "-m", "tests.nodes.driver"]
HOSTS = [f"127.0.0.{index}" for index in range(2, 6)]

N_PROMPTS = 6

COMMON = [
    "train", str(ROOT / "recipes" / "quickstart.yaml"), "train_dataset.batch_size=4", "gconfig.n_samples=4",
    "valid_dataset=null", "actor.kl_ctl=0.01", "actor.ppo_n_minibatches=1",
    "actor.optimizer.lr_scheduler_type=constant", "actor.optimizer.warmup_steps_proportion=0",
    "actor.optimizer.min_lr_ratio=0",
    "stats.trackers=[]", "recover.freq_steps=1",
]  # fmt: skip
LISTS = [
    "rollout.backend=transformers:d2", "rollout.device_mapping=[0,5]",
    "actor.backend=megatron:(attn:d1t2|ffn:e2)", "actor.device_mapping=[3,4]",
    "ref.backend=megatron:d1", "ref.device_mapping=[2]",
]  # fmt: skip
"""With two devices on each node: rollout | reference, actor | actor, rollout | nothing."""
WITHOUT_THE_THIRD = [
    "rollout.backend=transformers:d1", "rollout.device_mapping=[0]",
    "actor.backend=megatron:p2", "actor.device_mapping=[1,2]",
    "ref.backend=megatron:d1", "ref.device_mapping=[5]",
]  # fmt: skip
LOST = "127.0.0.4"
"""The third node: it has rank 1 of both actor and rollout."""
END_S = 60.0
"""The run ends in four seconds on a machine that has nothing else to do."""


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
            assert f"  {host}: 8 GPUs, 8 of them free; 2 CPUs\n" in message


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


def value(row: dict[str, Any], flag: str) -> str:
    return str(row["command"][row["command"].index(flag) + 1])


def test_a_replica_that_is_larger_than_a_node_generates_on_two(cluster: PretendCluster, tmp_path: Path) -> None:
    python = write_python(tmp_path / "server")
    done = subprocess.run(
        [
            *COMMAND, "eval", str(ROOT / "recipes" / "quickstart.yaml"), "scheduler.type=ray",
            f"scheduler.address={cluster.address}", "cluster.n_nodes=2", "cluster.n_gpus_per_node=1",
            "rollout.backend=vllm:d1t2", f"rollout.server_python={python}",
            f"valid_dataset.limit={N_PROMPTS}",
        ],
        env={**cluster.environment, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["n_prompts"] == N_PROMPTS
    rows = Log(tmp_path / "server").rows("start")
    hosts = {value(row, "--node-rank"): row["environment"]["VLLM_HOST_IP"] for row in rows}
    assert hosts.keys() == {"0", "1"}
    # Ray chooses two of the four nodes.
    assert len({*hosts.values()} & {node.host for node in cluster.nodes}) == 2
    assert {value(row, "--master-addr") for row in rows} == {hosts["0"]}
    assert all(row["environment"]["CUDA_VISIBLE_DEVICES"].isdigit() for row in rows), "each part has one GPU"
    pids = [pid for row in rows for pid in (row["pid"], row["parent"])]
    _, left = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=60)
    assert left == []


def command(cluster: PretendCluster, root: Path, n_nodes: int, n_gpus: int, n_steps: int, keys: list[str]) -> list[str]:
    where = [
        "scheduler.type=ray", f"scheduler.address={cluster.address}", f"cluster.n_nodes={n_nodes}",
        f"cluster.n_gpus_per_node={n_gpus}", f"cluster.fileroot={root}", f"total_train_steps={n_steps}",
    ]  # fmt: skip
    return [*COMMAND, *COMMON, *where, *keys]


def rows(root: Path) -> list[Row]:
    file = root / "quickstart" / "trial-0" / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_run_over_nodes_ends_with_a_lost_node_and_goes_on_without_it(cluster: PretendCluster, tmp_path: Path) -> None:
    over_nodes = tmp_path / "over nodes"
    checkpoints = over_nodes / "quickstart" / "trial-0" / "checkpoints"
    environment = {**cluster.environment, "PYTHONPATH": str(ROOT)}

    # Four nodes, until one is lost.
    killed = subprocess.Popen(
        command(cluster, over_nodes, 4, 2, 10_000, LISTS),
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while len(rows(over_nodes)) < 2 or not list(checkpoints.glob("step-*/manifest.json")):
        assert killed.poll() is None, killed.communicate()
        time.sleep(0.1)
    cluster.kill(LOST)
    began = time.monotonic()
    output, errors = killed.communicate(timeout=120)
    assert time.monotonic() - began < END_S
    assert killed.returncode == 1, output + errors
    assert f"lost node {LOST} (actor rank 1, rollout rank 1) in phase '" in errors.replace("\n", " ")
    assert "cluster.n_nodes=3" in errors
    assert "Traceback" not in output + errors
    before = rows(over_nodes)
    n_kept = max(int(manifest.parent.name.removeprefix("step-")) for manifest in checkpoints.glob("*/manifest.json"))

    # The weights reach the rollout's replicas on both of their nodes after every step, and the reference has its own.
    assert all(row["rollout_mismatch"] < 1e-4 for row in before)
    assert before[0]["kl_ref"] == pytest.approx(0, abs=1e-6)
    assert before[1]["kl_ref"] > 1e-6

    # The three nodes that are left go on, with another layout.
    n_steps = len(before) + 2
    result = subprocess.run(
        command(cluster, over_nodes, 3, 2, n_steps, WITHOUT_THE_THIRD),
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    after = rows(over_nodes)
    assert [row["step"] for row in after] == list(range(1, n_steps + 1))
    assert after[:n_kept] == before[:n_kept]
    assert all(row["rollout_mismatch"] < 1e-4 for row in after)
    cluster.add(n_gpus=8)
