"""An evaluation whose server is on two nodes of the cluster."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import psutil

from tests.e2e.conftest import COMMAND, ROOT
from tests.nodes.cluster import PretendCluster
from tests.unit.rollout.fake_server import Log, write_python

N_PROMPTS = 6


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
