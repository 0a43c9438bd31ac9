"""Peaks of memory by phase, with stand-ins for a GPU and for other ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fivefold.algorithms.metrics import metric_values
from fivefold.engine.metrics import UPDATE, PeakMemory


def test_each_phase_has_its_largest_peak_of_any_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    allocated = iter([5e9, 2e9, 7e9, 1e9])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: int(next(allocated)))
    # The allocator has had to make room 4 times by the first call, and 5 times by the second.
    retries = iter([4, 5])
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"num_alloc_retries": next(retries)})
    # Another rank has had 3 GB and 9 GB, and had to make room once.
    other = torch.tensor([3e9, 9e9, 1.0], dtype=torch.float64)
    monkeypatch.setattr(dist, "all_reduce", lambda peaks, op: peaks.copy_(torch.maximum(peaks, other)))
    memory = PeakMemory()
    for phase in ("reference", "reference", UPDATE):
        with memory.phase(phase):
            pass
    taken = {"peak_memory_gb/reference": 5.0, "peak_memory_gb/max": 9.0, "allocator_retries/max": 4.0}
    assert metric_values(memory.take("cpu")) == taken
    assert memory.take("cpu") == {}
    other = torch.zeros(2, dtype=torch.float64)
    with memory.phase(UPDATE):
        pass
    assert metric_values(memory.take("cpu")) == {"peak_memory_gb/max": 1.0, "allocator_retries/max": 1.0}


def test_processes_without_a_gpu_have_no_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    memory = PeakMemory()
    with memory.phase(UPDATE):
        pass
    assert memory.take() == {}
