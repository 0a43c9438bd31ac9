"""The event loop in which coroutine functions judge responses.

the main thread    judge_together ──> runs the loop itself: some functions need that thread, as for signals
several threads    judge_together ──> the loop, which runs in a separate thread; each call ends with its responses

A process has one loop, because clients of services, which a module often keeps in a variable, can be used in one only.
"""

from __future__ import annotations

import asyncio
import atexit
import math
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

from fivefold.rewards.reward import InWork, Judged, NamedReward
from fivefold.rewards.time_limit import OutOfTime, time_limit
from fivefold.types import Prompt

N_AT_ONCE = 64
"""Most responses that a coroutine function judges at the same time: services refuse too many requests at once."""
CLEAN_UP_S = 1.0
"""Seconds that a coroutine has to end when its time is over. Then it is taken to block the loop."""

_RUNS = threading.Lock()
"""Held while the loop runs, by the thread that runs it or lets it run in another: an evaluation may need it too."""


def judge_together(reward: NamedReward, prompts: Sequence[Prompt], judged: Sequence[Judged]) -> list[list[float]]:
    """Return the rewards of responses, which a coroutine function judges; at most `N_AT_ONCE` of all calls at one time.

    Args:
        reward: the reward.
        prompts: the prompt of each response, or of each group.
        judged: the completions, or groups of them, at least one.

    Raises:
        ValueError: an error of the function, a value that is no finite number, or a response that was judged for longer
            than `reward.timeout_s`, in which its wait for others does not count.
    """
    if _loop().is_beside:
        return _loop().judge_beside(reward, prompts, judged)
    with _RUNS:
        return _loop().judge_here(reward, prompts, judged)


@contextmanager
def beside() -> Iterator[None]:
    """Run the loop in a thread during the block, so that threads may judge at the same time.

    Calls that are in progress at the end of the block are cancelled.
    """
    with _RUNS:
        loop = _loop()
        loop.start()
        try:
            yield
        finally:
            loop.stop()


class _Loop:
    """An event loop, and what is judged in it."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        atexit.register(self._runner.close)
        # The runner makes it at the first use, which several threads may be.
        self._loop = self._runner.get_loop()
        self._places: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(N_AT_ONCE))
        """Held by each response that a reward judges, by the reward's name."""
        self._in_work: set[InWork] = set()
        self._calls: set[asyncio.Task[list[list[float]]]] = set()
        self._thread: threading.Thread | None = None
        """Runs the loop."""

    @property
    def is_beside(self) -> bool:
        """Whether the loop runs in a separate thread."""
        return self._thread is not None

    def judge_here(self, reward: NamedReward, prompts: Sequence[Prompt], judged: Sequence[Judged]) -> list[list[float]]:
        """Run the loop until the responses are judged. The main thread is interrupted if one of them blocks it."""
        limit_s = None if reward.timeout_s is None else reward.timeout_s + CLEAN_UP_S

        def left_s() -> float:
            oldest = self._oldest()
            return CLEAN_UP_S if oldest is None else _left_s(oldest)

        try:
            with time_limit(limit_s, left_s):
                return self._runner.run(self._judge(reward, prompts, judged))
        except BaseException as error:
            if isinstance(error, OutOfTime):
                self._abandon()
                oldest = self._oldest()
                # Where it has not interrupted a coroutine, the oldest one is the one that does not end.
                notes = getattr(error, "__notes__", None) or ([] if oldest is None else [f"at {oldest.what}"])
                raise reward.too_slow("one response", notes) from error
            self._replace()
            if not isinstance(error, SystemExit):
                raise
            # The function has started a task, whose SystemExit an event loop hands on.
            raise ValueError(
                f"a task of the reward function {reward.name!r} raised SystemExit({error.code!r}), which would end "
                "the run: raise another exception"
            ) from error

    def judge_beside(
        self, reward: NamedReward, prompts: Sequence[Prompt], judged: Sequence[Judged]
    ) -> list[list[float]]:
        """Wait until the loop, which runs in its thread, has judged the responses, or a response blocks it."""
        call = asyncio.run_coroutine_threadsafe(self._judge(reward, prompts, judged), self._loop)
        while not call.done():
            oldest = self._oldest()
            left_s = CLEAN_UP_S if oldest is None else _left_s(oldest)
            if oldest is not None and left_s <= 0:
                raise oldest.too_slow()
            wait([call], None if left_s == math.inf else left_s)
        return call.result()

    def _oldest(self) -> InWork | None:
        """Return the response in work that has the least time left, if there is one; any thread may ask."""
        return min(list(self._in_work), key=_left_s, default=None)

    def start(self) -> None:
        """Run the loop in a separate thread."""
        self._thread = threading.Thread(target=self._run, name="coroutines", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the calls that are in progress, and the thread."""
        assert self._thread is not None
        thread = self._thread
        wait([asyncio.run_coroutine_threadsafe(self._end(), self._loop)], 2 * CLEAN_UP_S)
        self._thread = None
        self._loop.call_soon_threadsafe(self._loop.stop)
        thread.join(CLEAN_UP_S)
        if thread.is_alive():
            self._abandon()
        elif self._calls:
            self._replace()

    def _run(self) -> None:
        while self._thread is not None:
            # What a task of the function raises goes through the loop, and to the response that waits for the task.
            with suppress(SystemExit, KeyboardInterrupt):
                self._loop.run_forever()

    async def _end(self) -> None:
        if calls := list(self._calls):
            _cancel(calls)
            await asyncio.wait(calls, timeout=CLEAN_UP_S)

    def _replace(self) -> None:
        """Judge no more in this loop, in which tasks may be left. The runner ends them with the process."""
        _loop.cache_clear()

    def _abandon(self) -> None:
        """Replace a loop in which a coroutine swallows its cancellation, or blocks, and leave it open at the end.

        To close it, the runner would wait until all of its tasks have ended, and keep the process alive.
        """
        atexit.unregister(self._runner.close)
        self._replace()

    async def _judge(
        self, reward: NamedReward, prompts: Sequence[Prompt], judged: Sequence[Judged]
    ) -> list[list[float]]:
        """Return the rewards of what each call judges; after the first exception, the others are cancelled."""
        tasks: list[asyncio.Task[list[float]]] = []

        async def judge(prompt: Prompt, each: Judged) -> list[float]:
            try:
                return await self._judge_one(reward, prompt, each)
            except (ValueError, OutOfTime):
                # At once: the others may be about to start, and to block as this one did.
                _cancel(tasks)
                raise

        tasks += [asyncio.create_task(judge(*each)) for each in zip(prompts, judged, strict=True)]
        call = asyncio.current_task()
        assert call is not None
        self._calls.add(call)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                    raise error
            return [task.result() for task in tasks]
        finally:
            _cancel(tasks)
            ended, left = await asyncio.wait(tasks, timeout=CLEAN_UP_S)
            await asyncio.gather(*ended, return_exceptions=True)
            if left:
                self._abandon()
            self._calls.discard(call)

    async def _judge_one(self, reward: NamedReward, prompt: Prompt, judged: Judged) -> list[float]:
        async with self._places[reward.name]:
            # Its time begins with its place.
            with reward.working(prompt, judged) as work:
                self._in_work.add(work)
                try:
                    async with asyncio.timeout(reward.timeout_s) as limit:
                        return await reward.judge_coroutine(prompt, judged)
                finally:
                    self._in_work.discard(work)
                    if limit.expired():
                        raise work.too_slow()


def _left_s(work: InWork) -> float:
    """Return the seconds after which a response is taken to block the loop."""
    return work.began + (work.reward.timeout_s or math.inf) + CLEAN_UP_S - time.perf_counter()


def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel the running tasks, each once: a second time would interrupt what they do to end."""
    for task in tasks:
        if not task.done() and not task.cancelling():
            task.cancel()


@cache
def _loop() -> _Loop:
    """Return the loop, which lasts as long as the process unless something in it fails."""
    return _Loop()
