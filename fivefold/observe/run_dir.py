"""The folder of a run: its files, the process that owns it, and how the run ended.

runs/<experiment_name>/<trial_name>/
    recipe.yaml      the resolved recipe: every key, also those left at their defaults
    status.json      setup | running | finished | failed | interrupted, and when
    metrics.jsonl    one line a step
    samples.jsonl    generations of each step
    tensorboard/
    logs/            <role>-<rank>.log of each worker; driver.log if the driver failed
    weights/         the trained model, Hugging Face format
    summary.json     accuracy before and after, seconds, versions, recipe
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import threading
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import psutil

from fivefold.config.load import resolved_yaml
from fivefold.config.paths import user_path
from fivefold.config.schema import RunConfig
from fivefold.observe.errors import RunFailed
from fivefold.observe.jsonl import write_json

State = Literal["setup", "running", "finished", "failed", "interrupted"]


class RunDir:
    """A run's folder; as a context manager it records how the run ends.

    with RunDir.create(recipe, overwrite=False) as run:
        ...                       set-up: a ValueError here is an error of the recipe, and stays a ValueError
        run.started()
        ...                       the run: a ValueError or an OSError here, such as a full disk, becomes a RunFailed
        run.write_summary({...})
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe = path / "recipe.yaml"
        self.status = path / "status.json"
        self.metrics = path / "metrics.jsonl"
        self.samples = path / "samples.jsonl"
        self.tensorboard = path / "tensorboard"
        self.logs = path / "logs"
        self.weights = path / "weights"
        self.summary = path / "summary.json"
        self.state: State = "setup"
        self._lock = threading.Lock()
        self._began = _now()

    @classmethod
    def of(cls, recipe: RunConfig) -> Self:
        """Return the folder of the recipe's run, which is not created."""
        # Absolute: on a joined cluster, workers have another working folder than the driver.
        return cls(user_path(recipe.cluster.fileroot).resolve() / recipe.experiment_name / recipe.trial_name)

    @classmethod
    def create(cls, recipe: RunConfig, *, overwrite: bool) -> Self:
        """Create the folder and write the resolved recipe into it.

        A folder without results, of a run that ended before its first step, is replaced even without `overwrite`.

        Raises:
            ValueError: `check_free` refuses the folder, or it cannot be created.
        """
        run = cls.of(recipe)
        run.check_free(overwrite=overwrite)
        try:
            if run.path.exists():
                shutil.rmtree(run.path)
            run.logs.mkdir(parents=True)
            run.recipe.write_text(resolved_yaml(recipe), encoding="utf-8")
            run._write_status("setup")
        except OSError as error:
            raise ValueError(
                f"cluster.fileroot={recipe.cluster.fileroot}: the outputs cannot be written to {run.path} "
                f"({error.strerror}): name a folder that you may write to"
            ) from error
        return run

    def check_free(self, *, overwrite: bool) -> None:
        """Refuse a folder that a new run must not replace.

        Raises:
            ValueError: it is not the folder of a run, its run still goes on, or it holds results without `overwrite`.
        """
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            self._refuse(overwrite=overwrite)

    def started(self) -> None:
        """Record that the set-up is over and the run has begun."""
        self._write_status("running")

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`."""
        write_json(self.summary, summary)

    def saved(self) -> dict[str, Path]:
        """Return the paths of all results that exist, by name; a run that failed may have some."""
        results = {
            "weights": self.weights,
            "metrics": self.metrics,
            "samples": self.samples,
            "TensorBoard": self.tensorboard,
            "summary": self.summary,
            "recipe": self.recipe,
            "logs": self.logs,
        }
        return {name: path for name, path in results.items() if _has_content(path)}

    def is_ours(self) -> bool:
        """Return whether this process started the run in the folder."""
        if not self.status.is_file():
            return False
        status = json.loads(self.status.read_text(encoding="utf-8"))
        return bool(status["host"] == socket.gethostname() and status["pid"] == os.getpid())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._write_status("finished")
            return
        had_started = self.state == "running"
        log = self.logs / "driver.log"
        try:
            self._write_status(
                "interrupted" if isinstance(error, KeyboardInterrupt) else "failed", str(error) or type(error).__name__
            )
            log.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        except OSError as failure:  # such as a full disk; the error to report is the one that ended the run
            error.add_note(f"how the run ended could not be written to {self.path}: {failure}")
        if had_started and isinstance(error, (ValueError, OSError)):
            raise RunFailed(f"{error}\n\nTraceback: {log}") from error

    def _refuse(self, *, overwrite: bool) -> None:
        """Raise ValueError unless the folder's content may be deleted."""
        if not self.status.is_file():
            raise ValueError(
                f"{self.path} exists and is not the folder of a run: choose another trial_name, such as "
                f"trial_name={self._free_name()}, or move it away"
            )
        status = json.loads(self.status.read_text(encoding="utf-8"))
        state = status["state"]
        goes_on = state in ("setup", "running")
        if goes_on and status["host"] != socket.gethostname():
            if overwrite:
                return
            raise ValueError(
                f"a run on {status['host']} (process {status['pid']}) may still go on in {self.path}, which cannot be "
                f"seen from here: choose another trial_name, such as trial_name={self._free_name()}, or, if it has "
                "ended, delete its results with --overwrite"
            )
        if goes_on and _is_alive(status):
            raise ValueError(
                f"a run goes on in {self.path} (process {status['pid']}): choose another trial_name, such as "
                f"trial_name={self._free_name()}, or end that run first"
            )
        has_results = any(_has_content(path) for path in (self.metrics, self.samples, self.weights, self.summary))
        if has_results and not overwrite:
            word = "killed" if goes_on else state
            raise ValueError(
                f"{self.path} holds the results of a {word} run of {status['began']}: choose another trial_name, "
                f"such as trial_name={self._free_name()}, or delete those results with --overwrite"
            )

    def _free_name(self) -> str:
        """Return the next trial name that is free in the experiment's folder: trial-0 -> trial-1."""
        match = re.fullmatch(r"(.*?)(\d+)", self.path.name)
        stem, number = (match[1], int(match[2])) if match else (f"{self.path.name}-", 0)
        while (name := f"{stem}{number + 1}") and (self.path.parent / name).exists():
            number += 1
        return name

    def _write_status(self, state: State, error: str | None = None) -> None:
        with self._lock:
            self.state = state
            write_json(
                self.status,
                {
                    "state": state,
                    "began": self._began,
                    "changed": _now(),
                    "host": socket.gethostname(),
                    "pid": os.getpid(),
                    "error": error,
                },
            )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _has_content(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.is_file() and path.stat().st_size > 0


def _is_alive(status: Mapping[str, Any]) -> bool:
    """Return whether the process of this machine that wrote `status` still runs, and not another of the same number."""
    if not psutil.pid_exists(status["pid"]):
        return False
    changed = datetime.fromisoformat(status["changed"]).timestamp()
    return bool(psutil.Process(status["pid"]).create_time() < changed + 1.0)
