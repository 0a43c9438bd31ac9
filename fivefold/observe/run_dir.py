"""The folder of a run: its files, the process that owns it, and how the run ended.

runs/<experiment_name>/<trial_name>/
    recipe.yaml      the resolved recipe: every key, defaults included
    about.json       the banner of the screen, the command, versions, and the machine
    engine.yaml      the whole configuration of each role's training engine, defaults included
    status.json      setup | running | finished | failed | interrupted | killed, and when
    heartbeat        touched every few seconds while the run is alive
    metrics.jsonl    one line per step
    samples.jsonl    generations of each step
    held_out_samples.jsonl   of each evaluation, with evaluator.n_logged_samples
    samples/         the same as parquet files, with the values of each token
    tensorboard/
    trackers/        local files of other trackers, and the run's key in them
    profile/         step-<n>/<role>/rank-<n>.trace.json.gz: traces of the steps of `profile.steps`
    logs/            <role>-<rank>.log of each worker; driver.log if the driver failed; *.events: when each
                     process did what; start-<n>/ of earlier starts
    checkpoints/     step-<n>/: the whole run at a step, from which it can resume
    weights/         the trained model in Hugging Face format
    critic/          the critic in Hugging Face format, if there is one
    summary.json     accuracy before and after, seconds, versions, recipe
"""

from __future__ import annotations

import fcntl
import re
import shutil
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from errno import ENOSPC
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, get_args

import yaml

from fivefold.config.load import resolved_yaml
from fivefold.config.paths import user_path
from fivefold.config.schema.run import RunConfig
from fivefold.json_text import read_json
from fivefold.observe import alive
from fivefold.observe.alive import Heartbeat, is_near, is_this_process, still_runs, this_process
from fivefold.observe.durable import PART, write_file
from fivefold.observe.errors import RunFailed
from fivefold.observe.json_records import cut_back, write_json
from fivefold.observe.sample_parts import cut_back_parts

State = Literal["setup", "running", "finished", "failed", "interrupted", "killed"]
GOING_ON: tuple[State, ...] = ("setup", "running")
"""States of a run that has not ended."""
STATUS = "status.json"
LOCK = ".lock"
"""File in the folder of the experiment that a process locks while it takes a run's folder."""
_EARLIER_LOGS = re.compile(r"start-\d+")


class RunDir:
    """A run's folder; as a context manager it records how the run ends.

    with RunDir.create(recipe, overwrite=False) as run:     # or RunDir.resume(recipe, step=12)
        ...                       setup: a ValueError here is an error of the recipe, and stays a ValueError
        run.started()
        ...                       the run: a ValueError or an OSError here, such as a full disk, becomes a RunFailed
        run.write_summary({...})
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe = path / "recipe.yaml"
        self.engine = path / "engine.yaml"
        self.status = path / STATUS
        self.about = path / "about.json"
        self.metrics = path / "metrics.jsonl"
        self.samples = path / "samples.jsonl"
        self.held_out_samples = path / "held_out_samples.jsonl"
        self.sample_parts = path / "samples"
        self.tensorboard = path / "tensorboard"
        self.trackers = path / "trackers"
        self.logs = path / "logs"
        self.profile = path / "profile"
        self.checkpoints = path / "checkpoints"
        self.weights = path / "weights"
        self.critic = self.weights_of("critic")
        self.summary = path / "summary.json"
        self.state: State = "setup"
        self._lock = threading.Lock()
        self._began = _now()
        self._heartbeat = Heartbeat(path / "heartbeat")
        self._resumed: tuple[RunConfig, int] | None = None
        """Recipe and step of a resumed run until it has started."""

    @classmethod
    def of(cls, recipe: RunConfig) -> Self:
        """Return the folder of the recipe's run without creating it."""
        # Absolute, because workers of a joined cluster have another working folder than the driver.
        return cls(user_path(recipe.cluster.fileroot).resolve() / recipe.experiment_name / recipe.trial_name)

    @classmethod
    def create(cls, recipe: RunConfig, *, overwrite: bool) -> Self:
        """Create the folder for a run that starts at its first step, and write the resolved recipe into it.

        The folder of a run that ended without results is replaced even without `overwrite`.

        Raises:
            ValueError: `check_free` refuses the folder, or it cannot be created.
        """
        run = cls.of(recipe)
        with run._alone(recipe):
            run.check_free(overwrite=overwrite)
            with run._writing(recipe):
                run.path.mkdir(exist_ok=True)
                # First, so that an interruption leaves the folder of a run that has ended.
                run._write_status("setup")
        with run._writing(recipe):
            run._write_recipe(recipe)
            run._clear()
            run.logs.mkdir()
        return run

    @classmethod
    def resume(cls, recipe: RunConfig, step: int) -> Self:
        """Open the folder for a run that resumes after `step`. `started` deletes the results of later steps.

        The logs of the workers move to `logs/start-<n>/`.

        Raises:
            ValueError: the run in the folder is still alive, or the folder cannot be written to.
        """
        run = cls.of(recipe)
        with run._alone(recipe):
            run.check_idle()
            run._began = (run.read_status() or {}).get("began", run._began)
            run._resumed = (recipe, step)
            with run._writing(recipe):
                run._write_status("setup")
        with run._writing(recipe):
            run._set_logs_aside()
        return run

    def check_free(self, *, overwrite: bool) -> None:
        """Refuse a folder that a new run must not replace.

        Raises:
            ValueError: it is not the folder of a run, its run is still alive, or it holds results without `overwrite`.
        """
        if not self.is_used():
            return
        self.check_idle()
        if self.has_results() and not overwrite:
            status = self.read_status() or {}
            raise ValueError(
                f"{self.path} holds the results of a {self.ending()} run of {status.get('began', 'an unknown time')}: "
                f"choose another trial_name, such as trial_name={self.free_name()}, or delete those results with "
                "--overwrite"
            )

    def check_idle(self) -> None:
        """Refuse a folder that is not a run's, or whose run is still alive.

        A run of another machine or container counts as ended if its heartbeat pauses for a minute. This is recorded.

        Raises:
            ValueError: the folder is refused.
        """
        if not self.is_used():
            return
        if not self.status.is_file():
            raise ValueError(
                f"{self.path} exists and is not the folder of a run: choose another trial_name, such as "
                f"trial_name={self.free_name()}, or move it away"
            )
        status = self.read_status()
        if status is None or status["state"] not in GOING_ON:
            return
        if self._is_alive(status):
            raise ValueError(
                f"a run is active in {self.path} (process {status['pid']} on {status['host']}): choose another "
                f"trial_name, such as trial_name={self.free_name()}, or end that run first"
            )

    def is_used(self) -> bool:
        """Return whether there is anything at the folder's path that a new run would have to replace."""
        # A run that was killed while writing its very first file leaves a part of it.
        first = f"{STATUS}{PART}"
        return self.path.exists() and (
            not self.path.is_dir() or any(file.name != first for file in self.path.iterdir())
        )

    def has_results(self) -> bool:
        """Return whether an earlier run has left more than its recipe and logs."""
        results = (
            self.metrics,
            self.samples,
            self.held_out_samples,
            self.checkpoints,
            self.weights,
            self.critic,
            self.summary,
        )
        return any(_has_content(path) for path in results)

    def ending(self) -> str:
        """Return how the run in the folder ended, for messages: `finished`, `failed`, `interrupted` or `killed`."""
        status = self.read_status()
        return "killed" if status is None or status["state"] in GOING_ON else str(status["state"])

    def free_name(self) -> str:
        """Return the next free trial name in the experiment's folder: trial-0 -> trial-1."""
        match = re.fullmatch(r"(.*?)(\d+)", self.path.name)
        stem, number = (match[1], int(match[2])) if match else (f"{self.path.name}-", 0)
        while (name := f"{stem}{number + 1}") and (self.path.parent / name).exists():
            number += 1
        return name

    def read_status(self) -> dict[str, Any] | None:
        """Return the content of `status.json`; None if it is missing or was damaged by a power failure."""
        try:
            status = read_json(self.status)
        except (FileNotFoundError, ValueError):
            return None
        return status if _is_status(status) else None

    def started(self) -> None:
        """Record that the setup is over and the run has begun. Delete what a resumed run will repeat."""
        if self._resumed is not None:
            recipe, step = self._resumed
            self._cut_back(step)
            self._write_recipe(recipe)
            self._resumed = None
        self._write_status("running")

    def present_state(self) -> State:
        """Return the state of the run in the folder; `killed` if its process ended without recording it.

        A run of another machine or container is alive if its heartbeat was touched within the last minute, by the clock
        of this machine.

        Raises:
            ValueError: the folder has no status.
        """
        status = self.read_status()
        if status is None:
            raise ValueError(f"{self.path} is not the folder of a run: it has no {STATUS}")
        state: State = status["state"]
        if state not in GOING_ON:
            return state
        if is_near(status):
            return state if still_runs(status) else "killed"
        return state if alive.was_touched_lately(self._heartbeat.path) else "killed"

    def write_about(self, about: Mapping[str, Any]) -> None:
        """Write `about.json`."""
        write_json(self.about, about)

    def weights_of(self, role: str) -> Path:
        """Return the folder of the saved weights of a role that is trained."""
        return self.weights if role == "actor" else self.path / role

    def write_engines(self, configs: Mapping[str, Any]) -> None:
        """Write `engine.yaml`: the configuration of the training engine of each role."""
        write_file(self.engine, yaml.safe_dump(dict(configs), sort_keys=False).encode())

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`."""
        write_json(self.summary, summary)

    def saved(self) -> dict[str, Path]:
        """Return the paths of all results that exist, by name; a run that failed may have some."""
        results = {
            "weights": self.weights,
            "critic": self.critic,
            "checkpoints": self.checkpoints,
            "metrics": self.metrics,
            "samples": self.samples,
            "held-out samples": self.held_out_samples,
            "TensorBoard": self.tensorboard,
            "summary": self.summary,
            "recipe": self.recipe,
            "engine": self.engine,
            "profile": self.profile,
            "logs": self.logs,
        }
        return {name: path for name, path in results.items() if _has_content(path)}

    def is_ours(self) -> bool:
        """Return whether this process started the run in the folder."""
        status = self.read_status()
        return status is not None and is_this_process(status)

    def __enter__(self) -> Self:
        self._heartbeat.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._heartbeat.stop()
        if error is None:
            self._write_status("finished")
            return
        had_started = self.state == "running"
        log = self.logs / "driver.log"
        where = f"Traceback: {log}"
        try:
            # A generator is closed by the program that asks for the steps.
            is_asked = isinstance(error, KeyboardInterrupt | GeneratorExit)
            self._write_status("interrupted" if is_asked else "failed", str(error) or type(error).__name__)
            log.write_text("".join(traceback.format_exception(error)), encoding="utf-8", errors="backslashreplace")
        except OSError as failure:  # such as a full disk; the error to report is still the one that ended the run
            where = f"how the run ended could not be written to {self.path}: {failure}"
            error.add_note(where)
        if had_started and isinstance(error, (ValueError, OSError)):
            is_full = isinstance(error, OSError) and error.errno == ENOSPC
            fix = ": free some space, and start the run again with the same command" if is_full else ""
            raise RunFailed(f"{error}{fix}\n\n{where}") from error

    def _is_alive(self, status: dict[str, Any]) -> bool:
        """Return whether the run of `status`, which has not recorded its end, is still alive."""
        if is_near(status):
            return still_runs(status)
        print(
            f"A run on {status['host']} may still be alive in {self.path}: watching its heartbeat for up to "
            f"{alive.WATCH_SECONDS:.0f} s.",
            file=sys.stderr,
            flush=True,
        )
        if alive.beats(self._heartbeat.path):
            return True
        write_json(self.status, status | {"state": "killed", "error": "its heartbeat stopped"})
        return False

    @contextmanager
    def _alone(self, recipe: RunConfig) -> Iterator[None]:
        """Let one process at a time look whether the folder is free, and take it: several may start at once."""
        with self._writing(recipe):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock = (self.path.parent / LOCK).open("wb")
        with lock:
            with self._writing(recipe):
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    @contextmanager
    def _writing(self, recipe: RunConfig) -> Iterator[None]:
        """Turn an OSError of the block into a ValueError about the recipe's folder."""
        try:
            yield
        except OSError as error:
            raise ValueError(
                f"cluster.fileroot={recipe.cluster.fileroot}: the outputs cannot be written to {self.path} "
                f"({error.strerror}): name a folder that you may write to"
            ) from error

    def _write_recipe(self, recipe: RunConfig) -> None:
        write_file(self.recipe, resolved_yaml(recipe).encode())

    def _clear(self) -> None:
        """Delete everything except the recipe and the status."""
        if self.checkpoints.exists():
            self._delete(self.checkpoints)
        for path in self.path.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path not in (self.recipe, self.status):
                path.unlink()

    def _set_logs_aside(self) -> None:
        """Move the logs of the previous start into `start-<n>`."""
        self.logs.mkdir(exist_ok=True)
        files = [path for path in self.logs.iterdir() if not _EARLIER_LOGS.fullmatch(path.name)]
        if files:
            number = 1 + sum(1 for path in self.logs.iterdir() if _EARLIER_LOGS.fullmatch(path.name))
            folder = self.logs / f"start-{number}"
            folder.mkdir()
            for path in files:
                path.replace(folder / path.name)

    def _cut_back(self, step: int) -> None:
        """Delete the results of the steps after `step` and of the end of the run."""
        # Checkpoints first: a run that is interrupted here must not resume from one whose metrics are gone.
        saved = (folder for models in (self.weights, self.critic) for folder in models.glob("step-*"))
        for folder in (*self.checkpoints.glob("step-*"), *saved):
            number = folder.name.removeprefix("step-")
            if number.isdecimal() and int(number) > step:
                self._delete(folder)
        for lines in (self.metrics, self.samples, self.held_out_samples):
            cut_back(lines, step)
        cut_back_parts(self.sample_parts, step)
        self.summary.unlink(missing_ok=True)

    def _delete(self, folder: Path) -> None:
        """Delete a folder so that an interruption never leaves a partial one that looks complete."""
        deleted = self.path / "deleted"
        if deleted.exists():
            shutil.rmtree(deleted)
        folder.replace(deleted)
        shutil.rmtree(deleted)

    def _write_status(self, state: State, error: str | None = None) -> None:
        with self._lock:
            self.state = state
            write_json(
                self.status,
                {
                    "state": state,
                    "began": self._began,
                    "changed": _now(),
                    **this_process(),
                    "error": error,
                },
            )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _has_content(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.is_file() and path.stat().st_size > 0


def _is_status(value: Any) -> bool:
    """Return whether a value has the entries of `status.json`, with valid times and process id."""
    if not isinstance(value, dict) or not value.keys() >= {"state", "host", "pid", "changed"}:
        return False
    try:
        times = [datetime.fromisoformat(value[name]) for name in ("began", "changed") if name in value]
    except (TypeError, ValueError):
        return False
    return bool(times) and isinstance(value["pid"], int) and value["state"] in get_args(State)
