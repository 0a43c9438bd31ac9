"""Finds out whether a Ray cluster takes commands from whoever reaches it."""

from __future__ import annotations

import os
import subprocess
import sys

OPEN = "open"
_PROBE = f"import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1]); print({OPEN!r})"


def is_open(gcs: str, limit_s: float) -> bool:
    """Return whether the cluster whose records are kept at an address, host:port, takes commands without a token.

    A cluster that answers in neither way within the limit, in seconds, counts as one that does not.
    """
    try:
        told = subprocess.run(
            [sys.executable, "-c", _PROBE, gcs],
            capture_output=True,
            text=True,
            # Ray reads the mode once, when it is imported: so in another process, which has no token.
            env={**os.environ, "RAY_AUTH_MODE": "disabled"},
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        return False
    return told.stdout.strip() == OPEN
