"""Trackers beside the training: each in a thread of its own, so that one that fails or hangs never ends or slows a run.

driver   log, finish ──queue──> thread of a tracker ──> its package ──> server or files
                                  │ raises: the rest is dropped, and `tell` says so once
"""

from __future__ import annotations

import json
import math
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from uuid import uuid4

from fivefold.config.keys import flattened
from fivefold.config.schema.recipe import Recipe
from fivefold.config.schema.run import PackagedTracker
from fivefold.observe.jsonl import write_json
from fivefold.observe.run_dir import RunDir
from fivefold.observe.sample_log import encodable
from fivefold.observe.trackers.tracker import TrackedRun, Tracker

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
"""Most calls that wait for a tracker; more are dropped, for it hangs."""
LAST_SAMPLES = 200
"""Samples in a tracker's table: the last ones."""


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
        """Hand over a call; None: the last one was handed over."""
        if self._failed:
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._fail(f"it has not answered for {MOST_WAITING:,} calls")

    def join(self) -> None:
        """Wait for the tracker's end, for at most `END_SECONDS`."""
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
        self._tell(f"{self._name} tracks this run no more ({why}); the run goes on, with metrics.jsonl")


class Trackers:
    """All trackers of a run, apart from TensorBoard."""

    def __init__(self, running: Sequence[Background] = ()) -> None:
        self._running = tuple(running)
        self._summary: dict[str, Any] = {}
        self._samples: list[Mapping[str, Any]] = []

    @staticmethod
    def open(recipe: Recipe, folder: RunDir, tell: Callable[[str], None]) -> Trackers:
        """Open the recipe's trackers; one that an earlier start of the run has opened goes on.

        Args:
            recipe: the recipe of the run.
            folder: its folder.
            tell: is told of a tracker that fails.
        """
        names = [name for name in TRACKERS if name in recipe.stats.trackers]
        key, is_new = _key(folder) if names else ("", True)
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
        """Log the metrics of a step, less those that are not finite."""
        finite = {name: float(value) for name, value in metrics.items() if value is not None and math.isfinite(value)}
        self._put(lambda tracker: tracker.log(step, finite))

    def samples(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Keep a step's samples for the table at the end."""
        if self._running:
            shown = [{name: encodable(value) for name, value in record.items()} for record in records[-LAST_SAMPLES:]]
            self._samples = [*self._samples, *shown][-LAST_SAMPLES:]

    def summary(self, summary: Mapping[str, Any]) -> None:
        """Keep the summary for the end."""
        self._summary = {name: value for name, value in summary.items() if name != "recipe"}

    def close(self) -> None:
        """Log the summary and the samples, and wait for the trackers' ends."""
        summary, samples = json.loads(json.dumps(self._summary, default=str)), self._samples
        self._put(lambda tracker: tracker.finish(summary, samples))
        self._put(None)
        for each in self._running:
            each.join()

    def _put(self, call: Callable[[Tracker], None] | None) -> None:
        for each in self._running:
            each.put(call)


def _opening(name: PackagedTracker, run: TrackedRun) -> Callable[[], Tracker]:
    """Return what opens a tracker. Its package is imported in the tracker's thread, for that takes seconds."""
    return lambda: getattr(import_module(f"fivefold.observe.trackers.{name}"), TRACKERS[name])(run)


def _key(folder: RunDir) -> tuple[str, bool]:
    """Return the key of the folder's run in its trackers, and whether it is new."""
    file = folder.trackers / "key.json"
    if file.is_file():
        return json.loads(file.read_text())["key"], False
    folder.trackers.mkdir(parents=True, exist_ok=True)
    key = f"{folder.path.name}-{uuid4().hex[:8]}"
    write_json(file, {"key": key})
    return key, True
