"""Which requests are sent to a server together, and how many at one time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from itertools import groupby
from typing import TypeVar

from fivefold.rollout.protocol import GenerationRequest, SamplingParams
from fivefold.rollout.servers.dialect import Ask
from fivefold.types import Completion

Job = TypeVar("Job")


def asks_of(requests: Sequence[GenerationRequest], sampling: SamplingParams, largest: int) -> list[Ask]:
    """Return what to ask for `requests`, in their order.

    Neighbours with the same prompt become one ask for up to `largest` completions. A seed belongs to one completion,
    and servers refuse to decode greedily more than once, so then each request is an ask of its own.
    """
    if sampling.seeded or sampling.greedy:
        seeds = (request.seed if sampling.seeded else None for request in requests)
        return [
            Ask(request.token_ids, 1, seed, request.wants_logprobs)
            for request, seed in zip(requests, seeds, strict=True)
        ]
    asks = []
    for (token_ids, wants_logprobs), group in groupby(requests, key=lambda r: (r.token_ids, r.wants_logprobs)):
        size = sum(1 for _ in group)
        asks += [Ask(token_ids, min(largest, size - start), None, wants_logprobs) for start in range(0, size, largest)]
    return asks


class Room:
    """Counts what a server decodes, so that it always has enough to do and the rest can go to another replica.

    The completions of a group end one by one, and the reply comes with the last: over the time of its reply, about half
    of them are decoded. A group therefore counts for half of its completions.
    """

    def __init__(self, most: int) -> None:
        """Make room for `most` sequences at one time."""
        self._most = most
        self._sequences = 0
        self._has_failed = False
        self._changed = threading.Condition()

    def admitted(self, jobs: Iterator[Job]) -> Iterator[Job]:
        """Yield the jobs, each of which is taken from its iterator when there is room; end after a failure."""
        while self._wait():
            job = next(jobs, None)
            if job is None:
                return
            yield job

    def taken(self, asks: Sequence[Ask]) -> Sequence[Ask]:
        """Count the asks of a job, which `held` gives back one by one; return them."""
        with self._changed:
            self._sequences += sum(map(_weight, asks))
        return asks

    @contextmanager
    def held(self, ask: Ask) -> Iterator[None]:
        """Give back the room of an ask after the block, and record its failure."""
        try:
            yield
        except BaseException:
            self._has_failed = True
            raise
        finally:
            with self._changed:
                self._sequences -= _weight(ask)
                self._changed.notify_all()

    def _wait(self) -> bool:
        """Wait for room; return whether nothing has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._sequences < self._most or self._has_failed)
            return not self._has_failed


def _weight(ask: Ask) -> int:
    return (ask.n + 1) // 2


def answered(
    jobs: Iterator[Sequence[Ask]], complete: Callable[[Ask], list[Completion]], most: int
) -> Iterator[tuple[int, Mapping[int, Completion]]]:
    """Yield each job's number and its completions, all at once, as jobs finish.

    Args:
        jobs: what each job asks for, one of which is taken when there is room for it.
        complete: asks the server, in a thread of its own.
        most: most sequences that the server decodes at one time.
    """
    room = Room(most)

    def held(ask: Ask) -> list[Completion]:
        with room.held(ask):
            return complete(ask)

    running: dict[int, list[Future[list[Completion]]]] = {}
    threads = ThreadPoolExecutor(most)
    try:
        for number, asks in enumerate(room.admitted(jobs)):
            running[number] = [threads.submit(held, ask) for ask in room.taken(asks)]
            yield from _take_finished(running)
        for _ in as_completed([future for futures in running.values() for future in futures]):
            yield from _take_finished(running)
    finally:
        threads.shutdown(cancel_futures=True)


def _take_finished(
    running: dict[int, list[Future[list[Completion]]]],
) -> Iterator[tuple[int, Mapping[int, Completion]]]:
    """Remove the jobs that have finished, and yield them; raise the failure of one that failed."""
    for number in [number for number, futures in running.items() if all(future.done() for future in futures)]:
        yield number, dict(enumerate(one for future in running.pop(number) for one in future.result()))
