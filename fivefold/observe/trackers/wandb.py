"""Weights & Biases. WANDB_MODE=offline keeps a run on this machine; other settings are its environment variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import wandb

from fivefold.observe.trackers.background import SAMPLE_COLUMNS, TrackedRun, sample_rows


class WandbTracker:
    """A run of Weights & Biases."""

    def __init__(self, run: TrackedRun) -> None:
        run.folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.key,
            resume="allow",
            config=dict(run.config),
            dir=str(run.folder),
            settings=wandb.Settings(console="off", silent=True),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step. A step that an earlier start has logged stays unchanged."""
        self._run.log(dict(metrics), step=step)

    def finish(self, summary: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> None:
        """Log the summary and a table of samples, and close."""
        if samples:
            self._run.log({"samples": wandb.Table(columns=list(SAMPLE_COLUMNS), data=sample_rows(samples))})
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code=0 if summary else 1)  # a run without a summary has not finished
