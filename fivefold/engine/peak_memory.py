"""The most device memory that tensors have had, by phase, and how often there was no room for more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

UPDATE = "max"
"""Phase of an update, whose peak is usually the largest."""
_RETRIES = "num_alloc_retries"
"""PyTorch's name for how often its allocator found no room, and returned what it kept for later to the device."""


class PeakMemory:
    """Peaks of this process since they were taken. Processes without a GPU have none."""

    def __init__(self) -> None:
        self._bytes: dict[str, int] = {}
        self._retries_before = 0

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
        """Return metrics of what was measured since the last call, and forget it.

        They are `peak_memory_gb/<phase>`, the largest peak of any rank in GB (1e9 bytes), and `allocator_retries/max`,
        the most times that a rank's allocator had to make room. All ranks call it together, after the same phases.

        Args:
            device: device of the tensor that the ranks exchange.
        """
        if not self._bytes:
            return {}
        retries = torch.cuda.memory_stats().get(_RETRIES, 0)
        most = torch.tensor([*self._bytes.values(), retries - self._retries_before], dtype=torch.float64, device=device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        *peaks, most_retries = most.tolist()
        taken = {f"peak_memory_gb/{phase}": peak / 1e9 for phase, peak in zip(self._bytes, peaks, strict=True)}
        self._bytes, self._retries_before = {}, retries
        return taken | {"allocator_retries/max": most_retries}
