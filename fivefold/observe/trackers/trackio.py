"""Trackio. It keeps runs on this machine unless TRACKIO_SPACE_ID names a remote space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import trackio

from fivefold.observe.trackers.background import SAMPLE_COLUMNS, TrackedRun, numbers, sample_rows


class TrackioTracker:
    """A run of Trackio."""

    def __init__(self, run: TrackedRun) -> None:
        self._run = trackio.init(
            project=run.project, name=run.key, resume="allow", config=dict(run.config), embed=False, auto_log_cpu=False
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def finish(self, summary: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> None:
        """Log the summary and a table of samples, and close."""
        if samples:
            frame = pd.DataFrame(sample_rows(samples), columns=list(SAMPLE_COLUMNS))
            self._run.log({"samples": trackio.Table(dataframe=frame)})
        if summary:
            self._run.log({f"summary/{name}": value for name, value in numbers(summary).items()})
        self._run.finish()
