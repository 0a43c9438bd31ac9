"""A limit on the time that a user's code takes for itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass
class Spent:
    """Adds up the time that the user's code of one episode takes."""

    seconds: float = 0.0


SPENT: ContextVar[Spent | None] = ContextVar("spent", default=None)
"""The sum of the episode that runs; None: nobody asks."""


class OwnTime:
    """Limits a block to so many seconds, not counting the time in which something is waited for.

    How long a model needs for its answers, or for new weights, then ends no episode.
    """

    def __init__(self, seconds: float) -> None:
        """`seconds`: the limit."""
        self._seconds = self._left = seconds
        self._n_waits = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._limit: asyncio.Timeout | None = None
        """The limit of the block that runs; None: none does."""

    @asynccontextmanager
    async def limited(self) -> AsyncIterator[None]:
        """Run the block within the limit.

        Raises:
            TimeoutError: it took longer.
        """
        self._loop = asyncio.get_running_loop()
        self._since = self._loop.time()
        async with asyncio.timeout(self._left) as self._limit:
            try:
                yield
            finally:
                if self._n_waits == 0:
                    self._left -= self._loop.time() - self._since
                self._limit = None

    @property
    def spent_s(self) -> float:
        """Seconds that the block took, without its waits."""
        return self._seconds - self._left

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Do not count the time of this block; any thread may run it, and several at once."""
        self._tell(1)
        try:
            yield
        finally:
            self._tell(-1)

    def _tell(self, change: int) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._count, change)

    def _count(self, change: int) -> None:
        """Stop the clock when the first wait begins, and let it run when the last one ends."""
        assert self._loop is not None
        before, self._n_waits, now = self._n_waits, self._n_waits + change, self._loop.time()
        if self._limit is None or self._limit.expired():
            return
        if before == 0:
            self._left -= now - self._since
            self._limit.reschedule(None)
        elif self._n_waits == 0:
            self._since = now
            self._limit.reschedule(now + self._left)
