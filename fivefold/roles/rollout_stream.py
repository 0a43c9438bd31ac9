"""Keeps the replicas at work on jobs that come and finish at any time, while their weights change.

submit ─> queue ─> the replica with the fewest requests ─> a slice of time on it ─> groups that are done
                                                            └──── again, as long as it has work

Between two slices a replica does what else it is asked for: it takes new weights, sleeps, or evaluates.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from fivefold.cluster.group import KeptCall
from fivefold.roles.responses import Group, Responses, Work, groups_of
from fivefold.roles.rollout import Rollout
from fivefold.roles.rollout_worker import Job, RolloutWorker
from fivefold.rollout.protocol import GenerationRequest, SamplingParams

SLICE_S = 0.2
"""Seconds after which a replica reports even if no job is done, so that it takes new jobs and new weights soon."""


class RolloutStream:
    """Jobs in progress on all replicas. Only one thread may use it."""

    def __init__(self, rollout: Rollout, sampling: SamplingParams, capacity: int) -> None:
        """Begin without a job.

        Args:
            rollout: the replicas.
            sampling: how tokens are chosen, for all jobs.
            capacity: requests that a replica answers at one time. It gets a further job as soon as it has fewer, so
                that those of the job which find no room wait there for the next that end.
        """
        self._rollout = rollout
        self._sampling = sampling
        self._capacity = capacity
        n = len(rollout.group)
        self._queue: deque[Job] = deque()
        self._jobs: list[dict[int, Job]] = [{} for _ in range(n)]
        """Jobs of each replica, by their number."""
        self._news: list[list[Job]] = [[] for _ in range(n)]
        """Those of them that the replica does not know yet."""
        self._loads = [0] * n
        """Requests of each replica that are not answered, as far as it has reported."""
        self._calls: dict[int, KeptCall[Responses]] = {}
        """The call in progress on each replica, the oldest first."""
        self._without_weights: set[int] = set()
        """Replicas whose server was started again, and which get no jobs before the next weights."""
        self._lost: dict[int, Sequence[GenerationRequest]] = {}
        """Jobs that replicas have lost, with their tokens so far, by number; `take_lost` forgets them."""
        self._died: set[int] = set()
        """Replicas whose server was started again; `take_died` forgets them."""
        self.work = [Work()] * n
        """What each replica has done, as far as it has reported."""

    @property
    def has_work(self) -> bool:
        """Whether some replica has a job, or can get one."""
        return any(self._jobs) or (bool(self._queue) and len(self._without_weights) < len(self._jobs))

    @property
    def needs_weights(self) -> bool:
        """Whether some replica has begun anew, and has no weights."""
        return bool(self._without_weights)

    def weights_sent(self) -> None:
        """Take note that all replicas have weights; any thread may call this."""
        self._without_weights.clear()

    def submit(self, job: Job) -> None:
        """Add a job, which begins when a replica has room for it."""
        self._queue.append(job)

    def advance(self) -> list[Group]:
        """Go on until a job is done, or a replica has reported that none is. Returns the jobs that are done.

        There must be work. It is not done while the replicas sleep.

        Raises:
            WorkerError: some worker of the session raised or died.
            PhaseTimeout: a replica did not report in time.
        """
        self._hand_out()
        if not any(self._jobs):
            return []
        for rank, jobs in enumerate(self._jobs):
            if jobs and rank not in self._calls:
                with self._rollout.gate.passing() as is_open:
                    if not is_open:
                        return []
                    self._calls[rank] = self._rollout.group.keep_on(
                        rank, RolloutWorker.advance, self._news[rank], self._sampling, SLICE_S
                    )
                self._news[rank] = []
        call, report = self._rollout.group.first_kept(list(self._calls.values()))
        del self._calls[call.rank]
        return self._done(call, report)

    def take_lost(self) -> dict[int, Sequence[GenerationRequest]]:
        """Return the jobs that replicas have lost since the last call, and that wait for others, with their tokens."""
        lost, self._lost = self._lost, {}
        return lost

    def take_died(self) -> list[int]:
        """Return the replicas whose server was started again since the last call; any thread may call this."""
        died, self._died = self._died, set()
        return sorted(died)

    def _hand_out(self) -> None:
        """Give jobs to replicas that have fewer requests than they can answer at one time.

        The requests of a group end at different times, so a request that has ended makes room before its job is done.
        """
        ranks = [rank for rank in range(len(self._jobs)) if rank not in self._without_weights]
        while self._queue and ranks:
            rank = min(ranks, key=self._loads.__getitem__)
            if self._loads[rank] >= self._capacity:
                return
            job = self._queue.popleft()
            self._jobs[rank][job.indices.start] = job
            self._news[rank].append(job)
            self._loads[rank] += len(job.requests)

    def _done(self, call: KeptCall[Responses], report: Responses) -> list[Group]:
        jobs = self._jobs[call.rank]
        self.work[call.rank] += Work.of([report])
        if report.lost or not report.has_weights:
            self._died.add(call.rank)
        if not report.has_weights:
            self._without_weights.add(call.rank)
            # What it was to get with its next call goes to others too.
            self._queue.extendleft(jobs.pop(job.indices.start) for job in reversed(self._news[call.rank]))
            self._news[call.rank] = []
        self._lost |= report.lost
        # First in the queue, in their order: their turn comes before that of all others.
        lost = [replace(jobs.pop(number), requests=requests) for number, requests in sorted(report.lost.items())]
        self._queue.extendleft(reversed(lost))
        self._loads[call.rank] = report.n_running + sum(len(job.requests) for job in self._news[call.rank])
        numbers = sorted(jobs.keys() & set(report.indices_N.tolist()))
        done = [jobs.pop(number) for number in numbers]
        asked = [list(zip(job.indices, job.prompts, strict=True)) for job in done]
        return groups_of(asked, report, call.payload)
