"""How much of a pipeline's time its stages wait for each other (the bubble).

begin                                                    last end of any stage
│ wait │ forward │ forward │ wait │ backward │ ... │ wait │         busy = forward + backward
└───────────────────────── span ──────────────────────────┘         bubble = 1 - busy / span
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

BUBBLE = "pipeline/bubble"
"""Name of the metric."""
_COMPUTING = ("forward-compute", "backward-compute")
_SCHEDULE = "forward-backward"


class StageTimers:
    """Stands in for Megatron-Core's timers (`config.timers`) during one pass of a schedule.

    On CUDA it puts events into the stream, for which nothing waits until the bubble is asked for.
    """

    def __init__(self) -> None:
        self._timers: dict[str, _Timer] = {}

    def __call__(self, name: str, log_level: int = 0) -> _Timer:
        """Return the timer of this name, as Megatron-Core asks for it."""
        return self._timers.setdefault(name, _Timer())

    def bubble(self, pipeline: dist.ProcessGroup) -> float:
        """Return the share of the pass that a stage waited, the mean over all ranks; collective over all processes.

        Args:
            pipeline: the ranks of this pipeline.
        """
        begin = self._timers[_SCHEDULE].starts[0]
        timers = [self._timers[name] for name in _COMPUTING]
        busy = sum(
            _seconds(start, end) for timer in timers for start, end in zip(timer.starts, timer.ends, strict=True)
        )
        span = max(_seconds(begin, end) for timer in timers for end in timer.ends)
        device = torch.cuda.current_device()
        longest = torch.tensor(span, device=device)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=pipeline)
        share = busy / longest / dist.get_world_size()
        dist.all_reduce(share)
        return 1 - float(share)


class _Timer:
    """The moments at which one part of the schedule started and ended."""

    def __init__(self) -> None:
        self.starts: list[_Moment] = []
        self.ends: list[_Moment] = []

    def start(self, barrier: bool = False) -> None:
        """Note a start. Ranks do not wait for each other here, whatever `barrier` says."""
        self.starts.append(_now())

    def stop(self, barrier: bool = False) -> None:
        """Note an end."""
        self.ends.append(_now())


_Moment = torch.cuda.Event | float
"""An event in the stream, or seconds on the clock of a CPU process."""


def _now() -> _Moment:
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(start: _Moment, end: _Moment) -> float:
    if isinstance(start, float) or isinstance(end, float):
        return float(end) - float(start)  # type: ignore[arg-type]
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000
