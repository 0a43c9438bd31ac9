"""Runs on a pretend cluster with workers that need no torch: `driver.py ADDRESS FOLDER CASE` prints JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

from fivefold.cluster.errors import WorkerError
from fivefold.cluster.ray_nodes import ray_nodes
from fivefold.cluster.role import Role
from fivefold.cluster.session import Session
from fivefold.config.load import load_recipe
from fivefold.config.schema.machines import ClusterConfig, SchedulerConfig
from fivefold.config.schema.train import TrainRecipe
from fivefold.layout.grid import rank_groups
from fivefold.layout.placement import Device, place
from fivefold.observe.errors import RunFailed
from fivefold.observe.timers import PhaseTimers

ROOT = Path(__file__).resolve().parents[2]
HANG_S = 300.0

COMMON = [
    "scheduler.type=ray", "experiment_name=megatron-moe-gsm8k-grpo", "trial_name=trial-0", "cluster.n_nodes=4",
    "cluster.n_gpus_per_node=8", "actor.path=Qwen/Qwen3-30B-A3B", "actor.megatron.use_deterministic_algorithms=True",
]  # fmt: skip
COMMANDS = {
    "one string": ["allocation_mode=sglang:d4t4+megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)"],
    "key by key": ["rollout.backend=sglang:d4t4", "actor.backend=megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)"],
}
"""The arguments of the commands that AReaL's documents show for 32 GPUs: in common, and how each writes the layouts."""


class Engine:
    """Says where it runs, and ends as the test asks."""

    def home(self) -> dict[str, str]:
        """Return address, devices, rank and number of ranks of this process."""
        names = ("CUDA_VISIBLE_DEVICES", "RANK", "WORLD_SIZE")
        return {"host": ray.util.get_node_ip_address(), **{name: os.environ[name] for name in names}}

    def kill_itself(self, rank: int) -> None:
        """Print last words and end without a traceback, if this is `rank`."""
        if int(os.environ["RANK"]) == rank:
            print("last words", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(HANG_S)

    def hang(self) -> None:
        """Do nothing for longer than a test takes."""
        time.sleep(HANG_S)


def open_session(address: str, folder: Path, n_nodes: int, n_gpus: int, wait_s: float = 60.0) -> Session:
    scheduler = SchedulerConfig(type="ray", address=address, wait_s=wait_s)
    return Session.open(
        scheduler, ClusterConfig(n_nodes=n_nodes, n_gpus_per_node=n_gpus), folder / "logs", PhaseTimers()
    )


def refused(address: str, folder: Path) -> dict[str, str]:
    """Ask for more than the cluster has. Returns the messages."""
    messages = {}
    for name, n_nodes, n_gpus in (("nodes", 5, 8), ("GPUs", 4, 9)):
        messages[name] = _why_not(address, folder, n_nodes, n_gpus)
    return messages


def without_fivefold(address: str, folder: Path) -> dict[str, str]:
    """Ask for two nodes, one of which cannot import Fivefold. Returns the message."""
    return {"message": _why_not(address, folder, 2, 1)}


def _why_not(address: str, folder: Path, n_nodes: int, n_gpus: int) -> str:
    try:
        open_session(address, folder, n_nodes, n_gpus, wait_s=1)
    except ValueError as error:
        return str(error)
    raise AssertionError("the session was opened")


def areal(address: str, folder: Path) -> dict[str, Any]:
    """Start all processes of AReaL's commands. Returns where they are, by role, and which ranks form groups."""
    placements = {}
    for name, layouts in COMMANDS.items():
        recipe = ROOT / "recipes" / "quickstart.yaml"
        placements[name] = place(load_recipe(_without_layouts(recipe, folder), [*COMMON, *layouts], TrainRecipe))
    first, second = placements.values()
    actor, rollout = first["actor"], first["rollout"]
    with open_session(address, folder, first.n_nodes, first.n_devices_per_node) as session:
        groups = session.launch(
            Role("actor", actor.devices, Engine),
            Role("rollout", rollout.devices, Engine, devices_per_process=rollout.layout.tp * rollout.layout.pp),
        )
        homes = {name: group.call(Engine.home) for name, group in groups.items()}
        free = [node.free_gpus for node in ray_nodes()]
    return {
        "same": first == second,
        "homes": homes,
        "free": free,
        "groups": {axis: rank_groups(actor.layout, axis) for axis in ("tp", "cp", "ep")},  # type: ignore[arg-type]
    }


def _without_layouts(recipe: Path, folder: Path) -> Path:
    """Write `recipe` without layouts and sizes, as AReaL's own file has none that its command does not overwrite."""
    import yaml

    keys = yaml.safe_load(recipe.read_text())
    del keys["rollout"], keys["actor"]["backend"], keys["cluster"]
    file = folder / "areal.yaml"
    file.write_text(yaml.safe_dump(keys))
    return file


def lost(address: str, folder: Path) -> dict[str, str]:
    """Print READY, wait until a node or the head is killed, and return the error."""
    devices = [Device(0, 0), Device(1, 0)]
    with suppress(RunFailed), open_session(address, folder, 2, 2) as session:
        groups = session.launch(Role("actor", devices, Engine), Role("rollout", [Device(1, 1)], Engine))
        print("READY", flush=True)
        try:
            with session.timers.phase("train"):
                groups["actor"].call(Engine.hang)
        except RunFailed as error:
            return {"error": type(error).__name__, "message": str(error)}
    return {}


def apart(address: str, folder: Path) -> dict[str, str]:
    """Run in a folder that the nodes do not see. Returns the errors of a role that writes and of a dead worker."""
    messages = {}
    devices = [Device(0, 0), Device(1, 0)]
    with open_session(address, folder, 2, 1) as session:
        try:
            session.launch(Role("actor", devices, Engine, writes_run=True))
        except ValueError as error:
            messages["writes"] = str(error)
        group = session.launch(Role("rollout", devices, Engine))["rollout"]
        try:
            group.call(Engine.kill_itself, 1)
        except WorkerError as error:
            messages["dies"] = str(error)
    return messages


CASES: Mapping[str, Any] = {
    "refused": refused,
    "areal": areal,
    "lost": lost,
    "apart": apart,
    "without": without_fivefold,
}

if __name__ == "__main__":
    _, address, folder, case = sys.argv
    print(json.dumps(CASES[case](address, Path(folder))))
