"""Counts the bytes that trainers move off their devices, and back, while they take turns with a rollout."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class MovedBytes:
    """Bytes of the rank that moved the most, added up over the calls since the last `take`."""

    freed: int = 0
    """Bytes of device memory that were given back."""
    restored: int = 0
    """Bytes of device memory that were allocated again."""

    def take(self) -> dict[str, float]:
        """Return the counts as metrics in GB (1e9 bytes), none if nothing was moved; and count from zero again."""
        if not self.freed and not self.restored:
            return {}
        metrics = {"offload/freed_gb": self.freed / 1e9, "offload/restored_gb": self.restored / 1e9}
        self.freed = self.restored = 0
        return metrics
