"""The memory that the cache of a rollout needs when it wakes, beside what the trainers of its devices leave.

The rollout's share of a device is settled when it starts, by what the plan says that the other roles keep. But CUDA's
allocator keeps memory that the plan does not know: segments in which one small tensor is left, workspaces, buffers of
NCCL.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class CacheRoom:
    """Compares the free memory of the fullest device with what the cache is going to take.

    Args:
        share: bytes of a device that an awake engine takes; None: it takes what it needs at the time.
    """

    share: int | None
    _weights: int = 0
    """Bytes of the engine's weights, as they were measured when they woke."""

    def weights_woke(self, free_before: int | None, free_after: int | None) -> None:
        """Take the free bytes before and after the weights woke; None: there is no GPU."""
        if free_before is not None and free_after is not None:
            self._weights = max(0, free_before - free_after)

    def lacks(self, free: int | None) -> bool:
        """Return whether `free` bytes are too few for the cache; without a share or a GPU they never are."""
        return self.share is not None and free is not None and free < self.share - self._weights
