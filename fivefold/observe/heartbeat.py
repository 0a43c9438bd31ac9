"""The sign of life of a run, for machines that cannot see its process.

run      touches <folder>/heartbeat every few seconds
other    watches the file for a while: it changes, or the run has ended

The watcher compares the file with itself, so the clocks of the machines do not matter.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

BEAT_SECONDS = 5.0
"""Time from one sign to the next."""
WATCH_SECONDS = 60.0
"""Time without a sign after which a run counts as ended."""
POLL_SECONDS = 0.5


class Heartbeat:
    """Touches a file again and again, in a thread of its own, until it is stopped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Create the file and begin.

        Raises:
            OSError: the file cannot be created.
        """
        self.path.touch()
        self._thread.start()

    def stop(self) -> None:
        """End the thread and delete the file."""
        self._stopped.set()
        self._thread.join()
        with suppress(OSError):  # a file without a beat does no harm
            self.path.unlink()

    def _beat(self) -> None:
        while not self._stopped.wait(BEAT_SECONDS):
            # A file server that does not answer for a moment must not end a run; a later beat succeeds.
            with suppress(OSError):
                os.utime(self.path)


def beats(path: Path) -> bool:
    """Watch the file for up to `WATCH_SECONDS`, and return whether it was touched."""
    before, deadline = _touched(path), time.monotonic() + WATCH_SECONDS
    while time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        if (touched := _touched(path)) is not None and touched != before:
            return True
    return False


def was_touched_lately(path: Path) -> bool:
    """Return whether the file was touched within `WATCH_SECONDS`, by the clock of this machine, without waiting."""
    try:
        return time.time() - path.stat().st_mtime < WATCH_SECONDS
    except OSError:
        return False


def _touched(path: Path) -> int | None:
    """Return the time of the last touch, in nanoseconds of the file server's clock; None if there is no file."""
    try:
        # Network file systems may answer `stat` from a cache; opening a file asks the server.
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None
