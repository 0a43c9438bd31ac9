"""Finds a server that hangs: it has not answered for long, and then does not show that it goes on.

answers ──> begin_anew()   quiet for `quiet_s` ─> beat() ─> the server has sampled a token since: it is only busy
                                                           └─> it has not in time: it is ended, and its requests fail

No answer alone says little, because an answer comes as a whole, and a long one after many minutes.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Watch:
    """Measures how long a server with requests is quiet."""

    def __init__(self, beat: Callable[[], None], quiet_s: float) -> None:
        """Begin without a server that answers.

        Args:
            beat: returns once the server has shown that it goes on; ends it and raises ServerDied if it does not.
            quiet_s: seconds without an answer after which it has to.
        """
        self._beat = beat
        self._quiet_s = quiet_s
        self._quiet_since = 0.0

    def begin_anew(self) -> None:
        """Measure from now on, because the server has answered, was asked or goes on; any thread may."""
        self._quiet_since = time.monotonic()

    @property
    def _left_s(self) -> float:
        """Seconds that a server which has requests may still be quiet."""
        return self._quiet_since + self._quiet_s - time.monotonic()

    def check(self) -> None:
        """Let a server that has requests and has been quiet for long show that it goes on.

        Raises:
            ServerDied: it does not, and was ended.
        """
        if self._left_s <= 0:
            self._beat()
            self.begin_anew()
