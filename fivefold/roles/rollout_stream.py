"""Keeps the replicas at work on jobs that come and finish at any time, while their weights may change.

submit ─> queue ─> the replica with the fewest requests ─> a slice of time on it ─> jobs that are done
           └ a part ─> the next one, if it got too many      └──── again, as long as it has work

Between two slices a replica does what else it is asked for: it takes new weights, or sleeps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from fivefold.cluster.group import KeptCall
from fivefold.roles.responses import Answer, Job, Responses, Work, answers_of
from fivefold.roles.rollout import Rollout
from fivefold.roles.rollout_worker import RolloutWorker

SLICE_S, LONGEST_SLICE_S = 0.2, 1.0
"""Seconds after which a replica reports even if no job is done, so that it takes new jobs and new weights soon: of few
replicas, and of many."""
REPORTS_PER_SECOND = 150
"""Most reports of all replicas without a job that is done, as far as `LONGEST_SLICE_S` allows. Each takes the driver
about a millisecond of processor time."""

MOST_ABOVE = 8
"""Requests by which a job may bring a replica above an even share. A job of more is cut: its episodes have one prompt,
which is then read on several replicas, and no replica has much longer to work than the others."""


class RolloutStream:
    """Jobs in progress on all replicas. Only one thread may use it."""

    def __init__(self, rollout: Rollout, capacity: int | None) -> None:
        """Begin without a job.

        Args:
            rollout: the replicas.
            capacity: requests that a replica answers at one time. It gets a further job once it has fewer. None: jobs
                that are submitted together are dealt at once, in shares of equally many requests; an embedded engine's
                rounding, which depends on the requests that it decodes together, is then the same in every run.
        """
        self._rollout = rollout
        self._capacity = capacity
        n = len(rollout.group)
        self._slice_s = min(max(SLICE_S, n / REPORTS_PER_SECOND), LONGEST_SLICE_S)
        self._queue: deque[Job] = deque()
        self._jobs: list[dict[int, Job]] = [{} for _ in range(n)]
        """Jobs of each replica, by their number."""
        self._news: list[list[Job]] = [[] for _ in range(n)]
        """The jobs among them that the replica does not know yet."""
        self._loads = [0] * n
        """Requests of each replica that are not answered, as far as it has reported."""
        self._calls: dict[int, KeptCall[Responses]] = {}
        """The call in progress on each replica, the oldest first."""
        self._without_weights: set[int] = set()
        """Replicas whose server was started again, and which get no jobs before the next weights."""
        self._lost: list[Job] = []
        """Jobs that replicas have lost, with their tokens so far; `take_lost` forgets them."""
        self._restarts: list[str] = []
        """Which servers were started again, and why; `take_restarts` forgets them."""
        self.work = [Work()] * n
        """What each replica has done, as far as it has reported."""

    @property
    def has_work(self) -> bool:
        """Whether some replica has a job, or can get one."""
        return any(self._jobs) or (bool(self._queue) and len(self._without_weights) < len(self._jobs))

    @property
    def needs_weights(self) -> bool:
        """Whether some replica was started again, and has no weights."""
        return bool(self._without_weights)

    def weights_sent(self) -> None:
        """Take note that all replicas have weights; any thread may call this."""
        self._without_weights.clear()

    def submit(self, jobs: Sequence[Job], *, first: bool = False) -> None:
        """Add jobs; each begins when a replica has room for it. `first`: before all that wait."""
        if self._capacity is None:
            self._deal(jobs)
        elif first:
            self._queue.extendleft(reversed(jobs))
        else:
            self._queue.extend(jobs)

    def advance(self) -> list[Answer]:
        """Wait until a job is done, or a replica has reported that none is. Returns the jobs that are done.

        There must be work. This waits while the replicas sleep.

        Raises:
            WorkerError: some worker of the session raised or died.
            PhaseTimeout: a replica did not report in time.
        """
        self._hand_out()
        if not any(self._jobs):
            return []
        if not self._begin_slices():
            return []
        call, report = self._rollout.group.first_kept(list(self._calls.values()))
        del self._calls[call.rank]
        return self._done(call, report)

    def take_lost(self) -> list[Job]:
        """Return the jobs that replicas have lost since the last call, and that wait for others, with their tokens."""
        lost, self._lost = self._lost, []
        return lost

    def take_restarts(self) -> list[str]:
        """Return which servers were started again since the last call, and why, once for each time."""
        restarts, self._restarts = self._restarts, []
        return restarts

    def _begin_slices(self) -> bool:
        """Start a slice on each replica that has jobs and is in none; return False if there are no more slices."""
        for rank, jobs in enumerate(self._jobs):
            if jobs and rank not in self._calls:
                with self._rollout.gate.passing() as is_open:
                    if not is_open:
                        return False
                    self._calls[rank] = self._rollout.group.keep_on(
                        rank, RolloutWorker.advance, self._news[rank], self._slice_s
                    )
                self._news[rank] = []
        return True

    def _hand_out(self) -> None:
        """Give jobs to replicas that have fewer requests than they can answer at one time.

        The requests of a job end at different times, so a request that has ended makes room before its job is done.
        A replica has one part of a job at a time, and what has failed on one goes to another. A job that would leave
        its replica with many more requests than the others, when all are handed out, is cut.
        """
        ranks = [rank for rank in range(len(self._jobs)) if rank not in self._without_weights]
        most = math.inf if self._capacity is None else self._capacity
        waiting: list[Job] = []
        n_left = sum(len(job.requests) for job in self._queue)
        while self._queue and ranks and min(self._loads[rank] for rank in ranks) < most:
            job = self._queue.popleft()
            others = [rank for rank in ranks if rank != job.failed_on] or ranks
            free = [rank for rank in others if job.number not in self._jobs[rank] and self._loads[rank] < most]
            if not free:
                waiting.append(job)
                continue
            rank, n = min(free, key=self._loads.__getitem__), len(job.requests)
            if len(free) > 1:
                even = _even_share([self._loads[rank] for rank in ranks], n_left)
                if self._loads[rank] + n > even + MOST_ABOVE:
                    n = max(1, even - self._loads[rank])
                    self._queue.appendleft(job.part(n, len(job.requests)))
                    job = job.part(0, n)
            self._give(rank, job)
            n_left -= n
        self._queue.extendleft(reversed(waiting))

    def _deal(self, jobs: Sequence[Job]) -> None:
        """Give each replica an equal share of the requests, cutting jobs where shares end."""
        size = -(-sum(len(job.requests) for job in jobs) // len(self._jobs))
        rank, room = 0, size
        for job in jobs:
            start = 0
            while start < len(job.requests):
                end = min(start + room, len(job.requests))
                self._give(rank, job.part(start, end))
                room -= end - start
                start = end
                if room == 0:
                    rank, room = rank + 1, size

    def _give(self, rank: int, job: Job) -> None:
        self._jobs[rank][job.number] = job
        self._news[rank].append(job)
        self._loads[rank] += len(job.requests)

    def _done(self, call: KeptCall[Responses], report: Responses) -> list[Answer]:
        jobs = self._jobs[call.rank]
        self.work[call.rank] += Work.of(report)
        for why in report.restarts:
            name = self._rollout.group.name
            self._restarts.append(f"{name} rank {call.rank}: {why}\nLog: logs/{name}-{call.rank}.log")
        if not report.has_weights:
            self._without_weights.add(call.rank)
            # What it was to get with its next call goes to others too.
            self._queue.extendleft(jobs.pop(job.number) for job in reversed(self._news[call.rank]))
            self._news[call.rank] = []
        # First in the queue, in their order: they come before all others.
        lost = [replace(jobs.pop(number), requests=requests) for number, requests in sorted(report.lost.items())]
        self._lost += lost
        self._queue.extendleft(reversed(lost))
        self._loads[call.rank] = report.n_running + sum(len(job.requests) for job in self._news[call.rank])
        done = [jobs.pop(number) for number in report.jobs]
        answers = answers_of(done, report, call.payload)
        return [part for job, answer in zip(done, answers, strict=True) for part in self._kept(job, answer, call.rank)]

    def _kept(self, job: Job, answer: Answer, rank: int) -> list[Answer]:
        """Return what stays of an answer from a replica; episodes that may be played again go into the queue."""
        if not job.retries:
            return [answer]
        kept, start = [], 0
        for failed, samples in groupby(answer.samples, key=lambda sample: sample.has_failed):
            end = start + len(list(samples))
            if failed:
                self._queue.append(replace(job.part(start, end), retries=job.retries - 1, failed_on=rank))
            else:
                kept.append(answer if end - start == len(job.requests) else answer.part(start, end))
            start = end
        return kept


def _even_share(loads: Sequence[int], n: int) -> int:
    """Return the most requests of any replica that gets some of `n` more, if those with the fewest get them evenly."""
    ordered = sorted(loads)
    together = n
    for place, load in enumerate(ordered, 1):
        together += load
        share = -(-together // place)
        if place == len(ordered) or share <= ordered[place]:
            return share
    raise ValueError("there is no replica to share requests: give the loads of at least one")
