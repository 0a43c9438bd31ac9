"""Runs on the nodes of one cluster: an evaluation whose server is on two, and a training that goes on after a loss."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.conftest import COMMAND, ROOT
from tests.nodes.cluster import PretendCluster
from tests.unit.rollout.fake_server import Log, write_python

Row = Mapping[str, Any]

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
