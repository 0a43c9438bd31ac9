"""MLflow. Without MLFLOW_TRACKING_URI, it stores runs in a database in the run's folder."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient
from mlflow.utils.uri import is_local_uri

from fivefold.observe.trackers.background import SAMPLE_COLUMNS, TrackedRun, sample_rows

KEY = "fivefold.key"
"""Tag with the key of a run, because MLflow assigns its own run ids."""
AT_ONCE = 100
"""Most parameters of one call."""
LONGEST = 500
"""Most characters of a parameter's value."""


class MlflowTracker:
    """A run of MLflow."""

    def __init__(self, run: TrackedRun) -> None:
        run.folder.mkdir(parents=True, exist_ok=True)
        store = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.folder / 'mlflow.db'}"
        self._client = MlflowClient(store)
        self._are_files = is_local_uri(store)
        """Whether each metric is a file, so that `ratio` and `ratio/max` cannot both exist."""
        experiment = self._client.get_experiment_by_name(run.project)
        if experiment is None:
            own = None if os.environ.get("MLFLOW_TRACKING_URI") else (run.folder / "artifacts").as_uri()
            number = self._client.create_experiment(run.project, artifact_location=own)
        else:
            number = experiment.experiment_id
        found = self._client.search_runs([number], f"tags.`{KEY}` = '{run.key}'")
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        self._id = self._client.create_run(number, run_name=run.name, tags={KEY: run.key}).info.run_id
        params = [Param(self._name(name), str(value)[:LONGEST]) for name, value in run.config.items()]
        for start in range(0, len(params), AT_ONCE):
            self._client.log_batch(self._id, params=params[start : start + AT_ONCE])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step."""
        now = int(time.time() * 1000)
        self._client.log_batch(
            self._id, [Metric(self._name(name), value, now, step) for name, value in metrics.items()]
        )

    def finish(self, summary: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> None:
        """Log the summary and a table of samples, and close."""
        if summary:
            self._client.log_dict(self._id, dict(summary), "summary.json")
        if samples:
            table = {"columns": list(SAMPLE_COLUMNS), "data": sample_rows(samples)}
            self._client.log_dict(self._id, table, "samples.json")
        self._client.set_terminated(self._id, "FINISHED" if summary else "KILLED")

    def _name(self, name: str) -> str:
        """Return the name of a metric or a parameter without the characters that MLflow refuses."""
        allowed = "".join(letter if letter.isalnum() or letter in "_-./ " else "_" for letter in name)
        return allowed.replace("/", ".") if self._are_files else allowed
