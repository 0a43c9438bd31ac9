"""Sizes as text."""

from __future__ import annotations


def size(n_bytes: float) -> str:
    """Format a number of bytes: 512 B, 1.3 kB, 24 MB, 1.024 TB."""
    for unit in ("B", "kB", "MB", "GB"):
        if n_bytes < 999.5:  # what is above has four digits when it is rounded
            return f"{n_bytes:.3g} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:,.3f} TB"
