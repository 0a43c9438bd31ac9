"""Runs of the command line with servers as rollout: stand-ins for SGLang's, which log their requests."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter, defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.e2e.conftest import ROOT, Fivefold
from tests.unit.rollout import fake_server
from tests.unit.rollout.fake_server import Log, read_tensors, write_python

N_STEPS, N_PROMPTS, N_SAMPLES = 2, 4, 4


def length(response: str, ground_truth: Any, *, data_source: str, extra_info: Mapping[str, Any]) -> float:
    """A reward that differs within a group, so that every step changes the weights."""
    return float(len(response))


@dataclass(frozen=True)
class Run:
    """One run of the command line, in its folder."""

    folder: Path
    result: subprocess.CompletedProcess[str]

    @property
    def log(self) -> Log:
        return Log(self.folder / "server")

    @property
    def output(self) -> Path:
        return self.folder / "quickstart" / "trial-0"


def train(fivefold: Fivefold, folder: Path, environment: Mapping[str, str]) -> Run:
    """Train the quickstart's recipe, with a layout in AReaL's own form."""
    recipe = yaml.safe_load((ROOT / "recipes" / "quickstart.yaml").read_text())
    del recipe["rollout"], recipe["actor"]["backend"], recipe["valid_dataset"]
    recipe["reward"] = {"fn": "tests.e2e.test_servers:length"}
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    result = fivefold(
        "train", str(file), "allocation_mode=sglang:d2+megatron:d1", f"total_train_steps={N_STEPS}",
        f"rollout.server_python={write_python(folder / 'server', **environment)}", f"cluster.fileroot={folder}",
        f"train_dataset.batch_size={N_PROMPTS}", f"gconfig.n_samples={N_SAMPLES}", "stats.trackers=[]",
        "rollout.seeded=true",
    )  # fmt: skip
    return Run(folder, result)


@pytest.fixture(scope="module")
def runs(fivefold: Fivefold, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """Two runs at the same time: one whose servers live, and one of whose servers dies in the first step."""
    environments = [{fake_server.HAS_CHILD: "1"}, {fake_server.DIES_IN: "/generate", fake_server.DIES_ONCE: "1"}]
    folders = [tmp_path_factory.mktemp("servers") for _ in environments]
    with ThreadPoolExecutor() as threads:
        lived, died = threads.map(partial(train, fivefold), folders, environments)
    return lived, died


def assert_nothing_is_left(log: Log) -> None:
    pids = {pid for row in log.rows("start") for pid in (row["pid"], row["parent"], row["child"]) if pid}
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=5)
    assert alive == []
    assert [row["folder"] for row in log.rows("load") if Path(row["folder"]).parents[1].exists()] == []


@pytest.fixture(scope="module")
def lived(runs: tuple[Run, Run]) -> Run:
    """The run that succeeds."""
    run = runs[0]
    assert run.result.returncode == 0, run.result.stderr + run.result.stdout
    assert "Traceback" not in run.result.stdout + run.result.stderr
    return run


def test_every_update_reaches_the_servers_of_all_replicas(lived: Run) -> None:
    servers = [row["pid"] for row in lived.log.rows("start")]
    assert len(servers) == 2
    loads = defaultdict(list)
    for row in lived.log.rows("load"):
        loads[row["pid"]].append(row)
    first, second = (loads[pid] for pid in servers)
    assert len(first) == len(second) == 1 + N_STEPS
    for one, other in zip(first, second, strict=True):
        assert one["tensors"] == other["tensors"]
        assert one["inodes"] == other["inodes"], "the replicas have copies of the files"
        assert one["folder"] != other["folder"]
    versions = [{tensor["name"]: tensor for tensor in row["tensors"]} for row in first]
    assert {tensor["dtype"] for tensor in first[0]["tensors"]} == {"F32"}
    assert not any(versions[0][name] == versions[-1][name] for name in versions[0] if "proj" in name)
    [saved] = (lived.output / "weights").glob("*.safetensors")
    assert versions[-1] == {tensor["name"]: tensor for tensor in read_tensors(saved)}


def test_the_requests_of_a_step_are_shared_out_over_the_replicas(lived: Run) -> None:
    """The completions of a group go to one replica, one with room; the servers have room for all of them."""
    asked = [row for row in lived.log.rows("request") if row["path"] == "/generate"]
    assert len(asked) == N_STEPS * N_PROMPTS * N_SAMPLES
    seeds = {row["body"]["sampling_params"]["sampling_seed"] for row in asked}
    assert len(seeds) == len(asked)
    by_server = Counter((tuple(row["body"]["input_ids"]), row["pid"]) for row in asked)
    assert set(by_server.values()) == {N_SAMPLES}
    assert {pid for _, pid in by_server} == {row["pid"] for row in lived.log.rows("start")}
    samples = [json.loads(line) for line in (lived.output / "samples.jsonl").read_text().splitlines()]
    assert {(sample["step"], sample["weight_version"]) for sample in samples} == {(1, 0), (2, 1)}


def test_a_server_that_dies_in_a_step_is_started_again_and_the_run_is_as_without(runs: tuple[Run, Run]) -> None:
    lived, died = runs
    assert died.result.returncode == 0, died.result.stderr + died.result.stdout
    told = re.search(r"rollout rank \d: (.*)\n(?:.*\n)+?Log: logs/rollout-\d\.log", died.result.stdout)
    assert told is not None
    assert "it is started again (1 of 3 times). Its last messages:" in told[1]
    assert len(died.log.rows("start")) == 3
    assert len(died.log.rows("load")) == 2 * (1 + 1 + N_STEPS), "all get the weights of now once more"
    samples = [(run.output / "samples.jsonl").read_text() for run in (lived, died)]
    assert samples[0] == samples[1]


def test_no_process_and_no_file_is_left(runs: tuple[Run, Run]) -> None:
    for run in runs:
        assert_nothing_is_left(run.log)


@pytest.mark.long
def test_a_server_that_dies_in_an_evaluation_is_started_again_and_the_result_is_as_without(
    fivefold: Fivefold, tmp_path: Path
) -> None:
    def evaluate(name: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        python = write_python(tmp_path / name, **environment)
        return fivefold(
            "eval", str(ROOT / "recipes" / "quickstart.yaml"), "rollout.backend=sglang:d2",
            f"rollout.server_python={python}", "evaluator.n_samples=2", "evaluator.greedy=false",
        )  # fmt: skip

    ways = {"lives": {}, "dies": {fake_server.DIES_IN: "/generate", fake_server.DIES_ONCE: "1"}}
    with ThreadPoolExecutor() as threads:
        lived, died = threads.map(evaluate, ways, ways.values())
    assert died.returncode == lived.returncode == 0, died.stderr
    assert json.loads(died.stdout) == json.loads(lived.stdout)
    assert "it is started again (1 of 3 times)" in died.stderr
    assert "started again" not in lived.stderr
    starts = [len(Log(tmp_path / name).rows("start")) for name in ways]
    assert starts == [2, 3]
