"""Counts the bytes that a trainer moves off its devices, and back, while it takes turns with other roles."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass
class MovedBytes:
    """Bytes of the rank that moved the most, added up over the calls since the last `take`."""

    freed: int = 0
    """Bytes of device memory that were given back."""
    restored: int = 0
    """Bytes of device memory that were allocated again."""

    def take(self) -> MovedBytes:
        """Return the counts, and count from zero again."""
        taken = MovedBytes(self.freed, self.restored)
        self.freed = self.restored = 0
        return taken


def moved_metrics(roles: Iterable[MovedBytes]) -> dict[str, float]:
    """Return the metrics of what several roles have moved, in GB (1e9 bytes); none if nothing was moved."""
    moved = list(roles)
    freed, restored = sum(each.freed for each in moved), sum(each.restored for each in moved)
    if not freed and not restored:
        return {}
    return {"offload/freed_gb": freed / 1e9, "offload/restored_gb": restored / 1e9}
