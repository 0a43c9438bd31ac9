"""A run to be interrupted: `fivefold train` with a training loop of two workers that never end their phase.

With `trial_name=collective`, rank 0 waits for rank 1 in a collective, and the phase may take two seconds from then on.

Prints "READY <pid of each worker and of a process started by one>" when the phase has begun.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import engines

from fivefold.cli.main import app
from fivefold.cluster import failures
from fivefold.cluster.role import Role
from fivefold.cluster.session import Session
from fivefold.config.schema.train import TrainRecipe
from fivefold.layout.placement import Device
from fivefold.observe.run_dir import RunDir
from fivefold.observe.timers import PhaseTimers


def train(recipe: TrainRecipe, *, overwrite: bool, screen: str) -> None:
    timers = PhaseTimers()
    with (
        RunDir.create(recipe, overwrite=overwrite) as run,
        Session.open(recipe.scheduler, recipe.cluster, run.logs, timers) as session,
    ):
        in_collective = recipe.trial_name == "collective"
        engine = engines.GlooEngine if in_collective else engines.Engine
        group = session.launch(Role("actor", [Device(0, 0)] * 2, engine, distributed=in_collective))["actor"]
        run.started()
        run.metrics.write_text('{"step": 1}\n')
        pids = [*group.call(engines.Engine.pid), *group.call(engines.Engine.spawn_child)]
        with timers.phase("train"):
            print("READY", *pids, flush=True)
            if in_collective:
                running = group.start(engines.GlooEngine.reduce_without, 1, engines.HANG_S, str(run.path))
                engines.wait_for_file(run.path / "0 sums")
                session.timeout_s = 2.0
                running.wait()
            group.call(engines.Engine.hang_here)


if __name__ == "__main__":
    module = types.ModuleType("fivefold.train")
    module.train = train  # type: ignore[attr-defined]
    sys.modules["fivefold.train"] = module
    failures.STACK_TIMEOUT_S = engines.SOON_S
    app()
