"""A trace of what a rank computes, and a picture of its GPU's memory, for some steps of a run."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from fivefold.cluster.role import Part
from fivefold.config.schema.run import ProfileConfig

MOST_ALLOCATIONS = 200_000
"""Most allocations that the memory's history holds; older ones are forgotten."""


class Profiler(Part):
    """Records what this rank does between `start` and `write`, if it is one of those that record."""

    def __init__(self, _worker: object) -> None:
        """Record nothing yet."""
        self._recording: Recording | None = None

    def start(self, config: ProfileConfig) -> None:
        """Begin to record."""
        if dist.get_rank() in config.ranks:
            self._recording = Recording(memory=config.memory)

    def write(self, folder: Path) -> None:
        """Write what was recorded since `start` to `folder`, as `rank-<n>.trace.json.gz`.

        Raises:
            OSError: a file cannot be written.
        """
        if self._recording is not None:
            self._recording.write(folder / f"rank-{dist.get_rank()}")
            self._recording = None


class Recording:
    """Records what this process does, from its construction until `write`; both in one thread."""

    def __init__(self, *, memory: bool) -> None:
        """Begin.

        Args:
            memory: whether to record every allocation on the GPU too.
        """
        # Imported here, because it takes a while, and few runs record anything.
        from torch.profiler import ProfilerActivity, profile

        on_gpu = torch.cuda.is_available()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        self._memory = memory and on_gpu
        if self._memory:
            torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS)
        self._profile = profile(activities=activities)
        self._profile.start()

    def write(self, stem: Path) -> None:
        """End, and write `<stem>.trace.json.gz`, which Perfetto shows, and on a GPU `<stem>.memory.pickle`.

        The latter is for https://pytorch.org/memory_viz.

        Raises:
            OSError: a file cannot be written.
        """
        self._profile.stop()
        stem.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(f"{stem}.trace.json.gz")
        if self._memory:
            torch.cuda.memory._dump_snapshot(f"{stem}.memory.pickle")
            torch.cuda.memory._record_memory_history(enabled=None)
