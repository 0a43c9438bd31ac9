"""SwanLab. SWANLAB_MODE=offline or local keeps a run on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import swanlab

from fivefold.observe.trackers.tracker import TrackedRun, numbers


class SwanlabTracker:
    """A run of SwanLab."""

    def __init__(self, run: TrackedRun) -> None:
        run.folder.mkdir(parents=True, exist_ok=True)
        swanlab.init(
            project=run.project,
            experiment_name=run.name,
            id=run.key,
            resume="allow",
            config=dict(run.config),
            logdir=str(run.folder),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step."""
        swanlab.log(dict(metrics), step=step)

    def finish(self, summary: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> None:
        """Log the summary and samples as texts, and close."""
        swanlab.log({f"summary/{name}": value for name, value in numbers(summary).items()})
        if samples:
            texts = [
                swanlab.Text(f"{sample['prompt']}\n\n{sample['response']}", caption=f"reward {sample['reward']}")
                for sample in samples
            ]
            swanlab.log({"samples": texts})
        swanlab.finish()
