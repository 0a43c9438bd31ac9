"""The commands of docs/cluster.md. `PretendCluster` runs those that start Ray by hand."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from fivefold.config.load import load_recipe
from fivefold.config.schema.train import TrainRecipe
from tests.e2e.documents import blocks, shell_commands
from tests.nodes.cluster import PAGE, ROOT, free_port
from tests.nodes.slurm_stand_in import PROGRAMS

N_SECONDS = 240


def test_the_run_by_hand_has_keys_of_a_recipe() -> None:
    by_hand, _ = shell_commands(PAGE)
    recipe = load_recipe(ROOT / "recipes" / "quickstart.yaml", by_hand[2:], TrainRecipe)
    assert recipe.scheduler.type == "ray"


@pytest.mark.long
def test_the_slurm_script_starts_ray_on_all_nodes_and_queues_an_unfinished_run_again(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in PROGRAMS:
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.nodes.slurm_stand_in {name} "$@"\n')
        program.chmod(0o755)
    activate = tmp_path / "activate"
    activate.write_text(f"export PATH={shlex.quote(str(programs))}:$PATH\n")
    text = blocks(PAGE, "bash")[1]
    for path, replacement in (("/shared/fivefold/.venv/bin/activate", str(activate)), ("6379", str(free_port()))):
        assert path in text
        text = text.replace(path, replacement)
    script = tmp_path / "job.sh"
    script.write_text(text)
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        job = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_ID": "77"}
        environment = {**os.environ, **job, "PYTHONPATH": str(ROOT), "STAND_IN_FOLDER": folder}
        log = tmp_path / "output.log"
        with log.open("w") as output:
            running = subprocess.Popen(
                ["bash", str(script)], env=environment, stdout=output, stderr=output, cwd=ROOT, start_new_session=True
            )
        try:
            assert running.wait(timeout=N_SECONDS) == 130, log.read_text()
        finally:
            _end_as_slurm_does(folder)
        assert "nodes 127.0.0.2 127.0.0.3" in log.read_text()
        assert "scontrol requeue 77" in log.read_text()


def _end_as_slurm_does(folder: str) -> None:
    """Kill all processes of the job, which have a variable with its folder."""
    for process in psutil.process_iter():
        try:
            if process.environ().get("STAND_IN_FOLDER") == folder:
                process.kill()
        except psutil.Error:
            continue
