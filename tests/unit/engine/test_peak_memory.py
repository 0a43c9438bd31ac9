"""Peaks of memory by phase, with stand-ins for a GPU and for other ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fivefold.engine.peak_memory import UPDATE, PeakMemory


def test_each_phase_has_its_largest_peak_of_any_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    allocated = iter([5e9, 2e9, 7e9])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: int(next(allocated)))
    # Another rank has had 3 GB and 9 GB.
    other = torch.tensor([3e9, 9e9], dtype=torch.float64)
    monkeypatch.setattr(dist, "all_reduce", lambda peaks, op: peaks.copy_(torch.maximum(peaks, other)))
    memory = PeakMemory()
    for phase in ("reference", "reference", UPDATE):
        with memory.phase(phase):
            pass
    assert memory.take("cpu") == {"reference": 5.0, "max": 9.0}
    assert memory.take("cpu") == {}


def test_processes_without_a_gpu_have_no_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    memory = PeakMemory()
    with memory.phase(UPDATE):
        pass
    assert memory.take() == {}
