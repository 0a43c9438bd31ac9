"""Writes the checkpoints of a run while training goes on.

    begin    the ranks copy their state to host memory, or write it        training waits
    commit   the ranks write and sync their files ─> .metadata, run.json,
             recipe.yaml ─> manifest.json ─> old checkpoints are deleted   in the background
    finish   the last checkpoint is on the disk

A write that fails is repeated, `recover.write_attempts` times in all; then the run ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

from fivefold.checkpoints.manifest import FileEntry, Manifest
from fivefold.checkpoints.run_state import MetricHistory, RunState
from fivefold.checkpoints.schedule import Schedule
from fivefold.checkpoints.store import RECIPE, CheckpointStore
from fivefold.config.load import resolved_yaml
from fivefold.config.problems import did_you_mean
from fivefold.config.schema.run import RunConfig
from fivefold.observe.durable import write_file
from fivefold.observe.errors import RunFailed
from fivefold.observe.timers import PhaseTimers

if TYPE_CHECKING:
    from fivefold.engine.state.dcp_files import WrittenFile, WrittenPart

Result = TypeVar("Result")

EVALUATION = "eval/"
"""Beginning of the names of metrics that only steps with an evaluation have."""


class StateOwner(Protocol):
    """A role whose state is in a checkpoint."""

    def snapshot(self, folder: Path) -> None:
        """Copy the state to host memory, for `write_snapshot` to write it below `folder`.

        Where no copy is made, it is written at once, or kept as it is if it never changes.

        Raises:
            OSError: some rank could not write.
        """

    def write_snapshot(self) -> Sequence[WrittenPart]:
        """Write the last snapshot, from any thread; may be repeated. Returns what each rank wrote.

        Raises:
            OSError: some rank could not write.
        """


@dataclass(frozen=True)
class _Begun:
    """A checkpoint whose state has been copied."""

    folder: Path
    state: RunState
    saved: str
    seconds: float
    """Time that the copy took."""


class Checkpointer:
    """Decides when a checkpoint is due, and writes it. It is a context manager; only one thread may use it."""

    def __init__(
        self,
        recipe: RunConfig,
        store: CheckpointStore,
        owners: Mapping[str, StateOwner],
        timers: PhaseTimers,
        *,
        schedule: Schedule,
        history: MetricHistory | None,
        note: Callable[[str], None],
        is_ours: Callable[[], bool],
    ) -> None:
        """Write nothing yet.

        Args:
            recipe: the recipe, whose section `recover` is followed, and which is saved with each checkpoint.
            store: the run's checkpoints.
            owners: whose state is saved, by the folder of a checkpoint that gets it.
            timers: timers of the driver; the copy counts for the phase `checkpoint`, the rest for `checkpoint write`.
            schedule: the frequencies of `recover`.
            history: values of the metric `recover.keep_best` at the steps before; None if there are none.
            note: shows a line of text to the user.
            is_ours: tells whether the run's folder is still that of this process; without it, nothing is committed.
        """
        self._recipe = recipe
        self._config = recipe.recover
        self._store = store
        self._owners = owners
        self._timers = timers
        self._schedule = schedule
        best = self._config.keep_best
        if history is None or history.name != best:
            history = None if best is None else MetricHistory(best, {})
        self._history = history
        self._note = note
        self._is_ours = is_ours
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._begun: _Begun | None = None
        self._writing: Future[None] | None = None
        self._has_told = False
        """Whether the user was told that a step lacks the metric of `recover.keep_best`."""
        self.longest_write = 0.0
        """Longest time, in seconds, that a checkpoint took from the beginning of its copy until it was written."""

    def is_due(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Return whether a checkpoint is due after `step`, whose metrics are `metrics`."""
        if not self._config.is_enabled:
            return False
        self._look_for_metric(step, metrics)
        return self._schedule.is_due(step) or self._is_best(metrics)

    def begin(self, state: RunState, metrics: Mapping[str, float]) -> None:
        """Copy the state of the run; if the checkpoint before is not on the disk yet, wait for it first.

        Raises:
            RunFailed: a checkpoint could not be written.
        """
        with self._timers.phase("checkpoint"):
            self.finish()
            if self._history is not None and (value := self._kept_value(metrics)) is not None:
                self._history = self._history.with_value(state.step, value)
            saved = datetime.now(UTC).isoformat(timespec="seconds")
            began = time.monotonic()
            folder = self._attempted(state.step, lambda: self._snapshot(state.step))
            seconds = time.monotonic() - began
            self._begun = _Begun(folder, replace(state, kept_metric=self._history), saved, seconds)
            self._schedule.done()

    def commit(self) -> None:
        """Write the checkpoint that was begun, if any, in the background. What it refers to must be on the disk.

        Raises:
            RunFailed: an earlier checkpoint could not be written.
        """
        begun, self._begun = self._begun, None
        if begun is not None:
            self._writing = self._pool.submit(self._write, begun)
        elif self._writing is not None and self._writing.done():
            self.finish()

    def finish(self) -> None:
        """Wait until the last checkpoint is on the disk.

        Raises:
            RunFailed: it could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After a failure nobody waits: the workers may be gone, and a checkpoint that is not committed does not count.
        self._pool.shutdown(wait=error is None, cancel_futures=True)

    def _is_best(self, metrics: Mapping[str, float]) -> bool:
        """Return whether `metrics` have a larger value of `recover.keep_best` than every checkpoint that is kept."""
        if self._history is None or (value := self._kept_value(metrics)) is None:
            return False
        kept = {checkpoint.step for checkpoint in self._store.all()}
        return all(value > other for step, other in self._history.values.items() if step in kept)

    def _look_for_metric(self, step: int, metrics: Mapping[str, float]) -> None:
        """Tell the user, once, that a step lacks the metric of `recover.keep_best`, whose name may be misspelled."""
        if self._history is None or self._has_told:
            return
        name = self._history.name
        # Steps without an evaluation say nothing about its metrics.
        of_its_kind = [one for one in metrics if one.startswith(EVALUATION) == name.startswith(EVALUATION)]
        if of_its_kind and name not in metrics:
            meant = did_you_mean(name, of_its_kind)
            self._note(f"recover.keep_best={name}: step {step} has no such metric{meant}")
            self._has_told = True

    def _kept_value(self, metrics: Mapping[str, float]) -> float | None:
        """Return the value of `recover.keep_best`; None if there is none, or one that is not finite."""
        value = None if self._history is None else metrics.get(self._history.name)
        return value if value is not None and isfinite(value) else None

    def _snapshot(self, step: int) -> Path:
        folder = self._store.begin(step)
        # All folders come first: an owner that has copied its state makes no second copy before the first is written,
        # so nothing behind a copy may fail and be attempted again.
        for name in self._owners:
            (folder / name).mkdir()
        for name, owner in self._owners.items():
            owner.snapshot(folder / name)
        return folder

    def _write(self, begun: _Begun) -> None:
        began = time.monotonic()
        with self._timers.phase("checkpoint write"):
            files = self._attempted(begun.state.step, lambda: self._files(begun))
            content = Manifest(begun.state.step, begun.saved, begun.state.fingerprints.config, files)
            self._attempted(begun.state.step, lambda: self._commit(begun.folder, content))
            self._prune()
        self.longest_write = max(self.longest_write, begun.seconds + time.monotonic() - began)

    def _prune(self) -> None:
        """Delete old checkpoints. One that cannot be deleted ends no run, because the newest one is on the disk."""
        best = None if self._history is None else self._history.best([each.step for each in self._store.all()])
        try:
            self._store.prune(self._config.max_to_keep, () if best is None else (best,))
        except OSError as error:
            self._note(f"an old checkpoint could not be deleted, which the next save attempts again: {error}")

    def _commit(self, folder: Path, content: Manifest) -> None:
        """Make the checkpoint count.

        Raises:
            RunFailed: another process has the run's folder.
        """
        if not self._is_ours():
            raise RunFailed(
                f"the checkpoint of step {content.step} is not committed: another process has taken over the run's "
                f"folder, {self._store.root.parent}, or has removed it. This process ends, so that there is one run"
            )
        self._store.commit(folder, content)

    def _files(self, begun: _Begun) -> dict[str, FileEntry]:
        """Write all files but the manifest. Returns their entries."""
        # Imported here: torch.distributed.checkpoint takes half a second, which a driver without checkpoints saves.
        from fivefold.engine.state.dcp_files import finish

        files: dict[str, FileEntry] = {}
        for name, owner in self._owners.items():
            written = finish(begun.folder / name, owner.write_snapshot())
            files |= {f"{name}/{file.name}": _entry(file) for file in written}
        write_file(begun.folder / RECIPE, resolved_yaml(self._recipe).encode())
        for path in (begun.folder / RECIPE, begun.state.write(begun.folder)):
            files[path.name] = FileEntry.of(path)
        return files

    def _attempted(self, step: int, action: Callable[[], Result]) -> Result:
        """Return what `action` returns; it is repeated after an OSError.

        Raises:
            RunFailed: the last attempt failed too.
        """
        for attempt in range(1, self._config.write_attempts + 1):
            try:
                return action()
            except OSError as error:
                failure = error
                self._note(f"the checkpoint of step {step} could not be written ({attempt}. attempt): {error}")
        latest = self._store.latest()
        left = "there is no earlier one" if latest is None else f"the last whole one is {latest.path}"
        raise RunFailed(
            f"the checkpoint of step {step} could not be written to {self._store.path(step)} in "
            f"{self._config.write_attempts} attempts (recover.write_attempts): {failure}. {left[0].upper()}{left[1:]}. "
            "Mend the cause, such as a full disk, and run the same command again"
        ) from failure


def _entry(file: WrittenFile) -> FileEntry:
    return FileEntry(file.n_bytes, file.xxh3_128)
