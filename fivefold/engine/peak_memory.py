"""The most device memory that tensors have had, by phase."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

UPDATE = "max"
"""Phase of an update, whose peak is usually the largest."""


class PeakMemory:
    """Peaks of this process since they were taken. Processes without a GPU have none."""

    def __init__(self) -> None:
        self._bytes: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the block, which belongs to phase `name`."""
        if not torch.cuda.is_available():
            yield
            return
        torch.cuda.reset_peak_memory_stats()
        yield
        self._bytes[name] = max(self._bytes.get(name, 0), torch.cuda.max_memory_allocated())

    def take(self, device: torch.device | str = "cuda") -> dict[str, float]:
        """Return the largest peak of any rank for each phase, in GB (1e9 bytes), and forget them.

        All ranks call it together, after the same phases.

        Args:
            device: device of the tensor that the ranks exchange.
        """
        if not self._bytes:
            return {}
        peaks = torch.tensor(list(self._bytes.values()), dtype=torch.float64, device=device)
        dist.all_reduce(peaks, dist.ReduceOp.MAX)
        taken = dict(zip(self._bytes, (peaks / 1e9).tolist(), strict=True))
        self._bytes = {}
        return taken
