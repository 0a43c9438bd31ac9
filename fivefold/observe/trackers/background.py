"""Trackers run alongside training, each in its own thread, so that one that fails or hangs never ends or slows a run.

driver   log, finish ──queue──> thread of a tracker ──> its package ──> server or files
                                  │ raises: the rest is dropped, and a note says so once
"""

from __future__ import annotations

import json
import math
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from fivefold.config.keys import flattened
from fivefold.config.schema.recipe import Recipe
from fivefold.config.schema.run import PackagedTracker
from fivefold.json_text import parsed
from fivefold.observe.json_records import write_json
from fivefold.observe.run_dir import RunDir
from fivefold.observe.sample_parts import encodable

TRACKERS: Mapping[PackagedTracker, str] = {
    "wandb": "WandbTracker",
    "mlflow": "MlflowTracker",
    "swanlab": "SwanlabTracker",
    "trackio": "TrackioTracker",
}
"""The class of each tracker, in the file of its name."""
END_SECONDS = 60.0
"""Longest time that the end of a run waits for a tracker."""
MOST_WAITING = 10_000
"""Most calls that wait for a tracker. If it hangs, further calls are dropped."""
LAST_SAMPLES = 200
"""Samples in a tracker's table: the last ones."""
SAMPLE_COLUMNS = ("step", "prompt", "response", "ground_truth", "reward", "finish_reason")
"""Columns of the table of samples."""


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker sees it when it opens."""

    project: str
    """The experiment's name."""
    name: str
    """The trial's name."""
    key: str
    """Identifies the run in the tracker; the same for every start of one run."""
    is_new: bool
    """Whether this is the run's first start."""
    config: Mapping[str, Any]
    """The resolved recipe under dotted keys, and the paths of the run's files."""
    folder: Path
    """Folder for the tracker's files on this machine."""


class Tracker(Protocol):
    """One tracker of one run. It is used from a single thread, and may raise anything."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the finite metrics of a step."""

    def finish(self, summary: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> None:
        """Log the summary and a table of samples, each with `SAMPLE_COLUMNS`, and close. Both may be empty."""


def sample_rows(samples: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Return the rows of a table of samples. A ground truth that is not a number is written as text."""
    return [
        [value if isinstance(value := sample.get(name), int | float) else str(value) for name in SAMPLE_COLUMNS]
        for sample in samples
    ]


def numbers(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the entries of a summary that are numbers."""
    return {name: float(value) for name, value in summary.items() if isinstance(value, int | float)}


def check_installed(names: Sequence[str]) -> None:
    """Refuse trackers whose packages are not installed.

    Raises:
        ValueError: it names the package and how to install it.
    """
    for name in names:
        if name in TRACKERS and find_spec(name) is None:
            raise ValueError(
                f"stats.trackers has {name}, but the package {name} is not installed: pip install 'fivefold[{name}]', "
                "or leave it out"
            )


class Background:
    """One tracker in a thread."""

    def __init__(self, name: str, open_it: Callable[[], Tracker], tell: Callable[[str], None]) -> None:
        self._name = name
        self._open = open_it
        self._tell = tell
        self._calls: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._failed = False
        self._thread.start()

    def put(self, call: Callable[[Tracker], None] | None) -> None:
        """Queue a call; None after the last one."""
        if self._failed:
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._fail(f"it has not answered for {MOST_WAITING:,} calls")

    def join(self) -> None:
        """Wait for the tracker to end, for at most `END_SECONDS`."""
        self._thread.join(END_SECONDS)
        if self._thread.is_alive() and not self._failed:
            self._fail(f"it has not ended after {END_SECONDS:.0f} s")

    def _work(self) -> None:
        try:
            tracker = self._open()
            while (call := self._calls.get()) is not None:
                call(tracker)
        except BaseException as error:  # noqa: BLE001 - a package may raise anything, and some end the process
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, why: str) -> None:
        self._failed = True
        self._tell(f"{self._name} no longer tracks this run ({why}); the run continues, with metrics.jsonl")


class Trackers:
    """All trackers of a run except TensorBoard."""

    def __init__(self, running: Sequence[Background]) -> None:
        self._running = tuple(running)
        self._summary: dict[str, Any] = {}
        self._samples: list[Mapping[str, Any]] = []

    @staticmethod
    def open(recipe: Recipe, folder: RunDir, tell: Callable[[str], None]) -> Trackers | None:
        """Open the recipe's trackers; None if it has none. A tracker resumes what an earlier start of the run opened.

        Args:
            recipe: the recipe of the run.
            folder: its folder.
            tell: shows a note about a tracker that fails.
        """
        names = [name for name in TRACKERS if name in recipe.stats.trackers]
        if not names:
            return None
        key, is_new = _key(folder)
        config = dict(flattened(recipe.model_dump()))
        places = {"weights": folder.weights, "checkpoints": folder.checkpoints, "folder": folder.path}
        run = TrackedRun(
            project=recipe.experiment_name,
            name=recipe.trial_name,
            key=key,
            is_new=is_new,
            config={**config, **{f"places.{name}": str(path) for name, path in places.items()}},
            folder=folder.trackers,
        )
        return Trackers([Background(name, _opening(name, run), tell) for name in names])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the finite metrics of a step."""
        finite = {name: float(value) for name, value in metrics.items() if value is not None and math.isfinite(value)}
        self._put(lambda tracker: tracker.log(step, finite))

    def samples(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Keep a step's samples for the table at the end."""
        shown = [{name: encodable(value) for name, value in record.items()} for record in records[-LAST_SAMPLES:]]
        self._samples = [*self._samples, *shown][-LAST_SAMPLES:]

    def summary(self, summary: Mapping[str, Any]) -> None:
        """Keep the summary for the end."""
        self._summary = {name: value for name, value in summary.items() if name != "recipe"}

    def close(self) -> None:
        """Log the summary and the samples, and wait for the trackers to end."""
        summary, samples = json.loads(json.dumps(self._summary, default=str)), self._samples
        self._put(lambda tracker: tracker.finish(summary, samples))
        self._put(None)
        for each in self._running:
            each.join()

    def _put(self, call: Callable[[Tracker], None] | None) -> None:
        for each in self._running:
            each.put(call)


def _opening(name: PackagedTracker, run: TrackedRun) -> Callable[[], Tracker]:
    """Return a function that opens a tracker. It imports the package in the tracker's thread, which takes seconds."""
    return lambda: getattr(import_module(f"fivefold.observe.trackers.{name}"), TRACKERS[name])(run)


def _key(folder: RunDir) -> tuple[str, bool]:
    """Return the key of the folder's run in its trackers, and whether it is new."""
    file = folder.trackers / "key.json"
    if file.is_file():
        return parsed(file.read_text())["key"], False
    folder.trackers.mkdir(parents=True, exist_ok=True)
    key = f"{folder.path.name}-{uuid4().hex[:8]}"
    write_json(file, {"key": key})
    return key, True
