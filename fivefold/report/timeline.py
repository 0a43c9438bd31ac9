"""The time line of a run: which process did what, from its events.

logs/*.events, logs/start-<n>/*.events ─> Timeline ─> chrome_trace   JSON that Perfetto and chrome://tracing open
                                                   ─> timeline_block what the page draws
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fivefold.json_text import parsed_object
from fivefold.observe.timers import MAIN, SUFFIX
from fivefold.report.blocks import table_block
from fivefold.report.growing import GrowingLines

MOST_EVENTS = 40_000
"""Events of a page: the newest ones, which its browser draws without delay."""
DRIVER = "driver"
_STEM = re.compile(r"(.+)-(\d+)")
_START = re.compile(r"start-(\d+)")


@dataclass(frozen=True, slots=True)
class Event:
    """A phase of the driver, or a call of a worker's method."""

    process: str
    """`driver`, or role and rank such as `actor-3`."""
    thread: str
    """What the thread does, such as `rollout`; `main` for the process's own work."""
    name: str
    start: float
    """Seconds since 1970, on the clock of the process's machine."""
    seconds: float


@dataclass(frozen=True)
class Timeline:
    """The events of all processes of a run, of all its starts."""

    events: tuple[Event, ...]
    """Sorted by their start."""
    steps: tuple[tuple[int, float], ...]
    """Each step's number and the time of its end."""

    @staticmethod
    def read(logs: Path) -> Timeline:
        """Read the events below a run's folder of logs."""
        return EventFiles(logs).read()

    def between(self, first: int, last: int) -> Timeline:
        """Return the events of the steps from `first` to `last`.

        Raises:
            ValueError: there is no such step.
        """
        ends = dict(self.steps)
        if first not in ends or last not in ends or last < first:
            known = f"{min(ends)}-{max(ends)}" if ends else "none"
            raise ValueError(f"--steps {first}-{last}: the run has events of steps {known}")
        begin = max((at for step, at in self.steps if at < ends[first] and step < first), default=0.0)
        kept = tuple(event for event in self.events if event.start < ends[last] and event.start + event.seconds > begin)
        return Timeline(kept, tuple(each for each in self.steps if first <= each[0] <= last))

    def tracks(self) -> list[tuple[str, str]]:
        """Return each process and thread that has events: the driver first, then by role and rank; `main` first."""
        found = {(event.process, event.thread) for event in self.events}
        return sorted(
            found,
            key=lambda track: (track[0] != DRIVER, *_role_and_rank(track[0]), track[1] != MAIN, track[1]),
        )


class EventFiles:
    """The files of events below a folder of logs, which grow: `read` reads what has come since the last call."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._files: dict[Path, _EventFile] = {}

    def read(self) -> Timeline:
        """Return the events of all processes, of all starts of the run."""
        known = self._files
        self._files = {file: known.get(file) or _EventFile(file) for file in sorted(self._logs.glob(f"**/*{SUFFIX}"))}
        for file in self._files.values():
            file.read()
        events = (event for file in self._files.values() for event in file.events)
        steps = (step for file in self._files.values() for step in file.steps)
        return Timeline(
            tuple(sorted(events, key=lambda event: event.start)), tuple(sorted(steps, key=lambda each: each[1]))
        )


class _EventFile:
    """The events of one process at one start of the run."""

    def __init__(self, path: Path) -> None:
        self._process = path.stem
        self._lines = GrowingLines(path)
        self.events: list[Event] = []
        self.steps: list[tuple[int, float]] = []

    def read(self) -> None:
        """Read what has come; another start of the run begins the file again."""
        if self._lines.begin_anew_if_changed():
            self.events, self.steps = [], []
        for _, line in self._lines.new():
            try:
                record = parsed_object(line)
            except ValueError:  # a process that was killed may leave half a line
                continue
            if _are_numbers(record, "step", "at"):
                self.steps.append((record["step"], record["at"]))
            elif _are_numbers(record, "start", "seconds") and record.keys() >= {"name", "thread"}:
                name, thread = str(record["name"]).replace("_", " "), str(record["thread"])
                self.events.append(Event(self._process, thread, name, record["start"], record["seconds"]))


def _are_numbers(record: dict[str, Any], *names: str) -> bool:
    return all(isinstance(record.get(name), int | float) for name in names)


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Return the time line in Chrome's trace format: microseconds, a process for each rank, a thread for each track.

    No two threads have one number, and none is 0: Perfetto takes thread 0 for the one with the number of its process.
    """
    origin = timeline.events[0].start if timeline.events else 0.0
    threads = {track: number for number, track in enumerate(timeline.tracks(), start=1)}
    processes: dict[str, int] = {}
    for (process, _), number in threads.items():
        processes.setdefault(process, number)
    named = [
        {"ph": "M", "name": name, "pid": number, "tid": number, "args": {key: value}}
        for process, number in processes.items()
        for name, key, value in (("process_name", "name", process), ("process_sort_index", "sort_index", number))
    ]
    named += [
        {"ph": "M", "name": "thread_name", "pid": processes[track[0]], "tid": number, "args": {"name": title(track)}}
        for track, number in threads.items()
    ]
    spans = [
        {
            "ph": "X",
            "name": event.name,
            "cat": _role_and_rank(event.process)[0],
            "pid": processes[event.process],
            "tid": threads[event.process, event.thread],
            "ts": round((event.start - origin) * 1e6, 1),
            "dur": round(event.seconds * 1e6, 1),
        }
        for event in timeline.events
    ]
    driver = processes.get(DRIVER, 1)
    marks = [
        {
            "ph": "i",
            "s": "g",
            "name": f"end of step {step}",
            "pid": driver,
            "tid": driver,
            "ts": round((at - origin) * 1e6, 1),
        }
        for step, at in timeline.steps
    ]
    return {"displayTimeUnit": "ms", "traceEvents": [*named, *spans, *marks]}


def title(track: tuple[str, str]) -> str:
    """Return the name of a process's thread."""
    process, thread = track
    return process if thread == MAIN else f"{process}, {thread}"


def timeline_block(timeline: Timeline) -> bytes:
    """Return the newest events as a table block.

    Its columns are `track`, `name` (indices into lists of the header), `since` (seconds since the start of the event
    before, because a float32 holds no date) and `seconds`.
    """
    events = timeline.events[-MOST_EVENTS:]
    origin = events[0].start if events else 0.0
    tracks = timeline.tracks()
    names = sorted({event.name for event in events})
    starts = np.array([event.start for event in events])
    columns = {
        "track": np.array([tracks.index((event.process, event.thread)) for event in events]),
        "name": np.array([names.index(event.name) for event in events]),
        "since": np.diff(starts, prepend=starts[:1]),
        "seconds": np.array([event.seconds for event in events]),
    }
    ends = [[step, round(at - origin, 4)] for step, at in timeline.steps if at >= origin]
    left_out = len(timeline.events) - len(events)
    floats = {name: column.astype(np.float32) for name, column in columns.items()}
    return table_block(floats, tracks=[title(track) for track in tracks], labels=names, steps=ends, left_out=left_out)


def _role_and_rank(process: str) -> tuple[str, int]:
    match = _STEM.fullmatch(process)
    return (match[1], int(match[2])) if match else (process, 0)
