"""Jobs that replicas answer beside one another: which replica gets which, and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

import pytest

from fivefold.batch import Columns
from fivefold.cluster.group import KeptCall, WorkerGroup
from fivefold.experience.group import Group
from fivefold.roles.responses import Job, Responses
from fivefold.roles.rollout_stream import MOST_ABOVE, RolloutStream
from fivefold.roles.rollout_worker import RolloutWorker
from fivefold.rollout.protocol import GenerationRequest, SamplingParams
from fivefold.types import Completion, Episode, Prompt
from tests.unit.experience.local_replicas import LocalGroup, LocalRollout

SLOTS, SIZE, N_JOBS = 8, 4, 12
SAMPLING = SamplingParams(16, 0, False, 1.0, 1.0, 0, (), ())


class TailedWorker(RolloutWorker):
    """Decodes one token of each of `SLOTS` requests in a slice; the last request of a group is long."""

    def __init__(self, long: int) -> None:
        self._left: list[tuple[Job, list[int]]] = []
        """Jobs, and the tokens that each of their requests lacks."""
        self._long = long
        self.decoded: list[int] = []
        """Requests that were decoded in each slice."""
        self.begun: list[int] = []
        """Jobs in the order in which they came."""

    def advance(self, jobs: Sequence[Job], seconds: float) -> tuple[Responses, Columns | None]:
        self._left += [(job, [1] * (SIZE - 1) + [self._long]) for job in jobs]
        self.begun += [job.number for job in jobs]
        running = [(left, place) for _, left in self._left for place in range(SIZE) if left[place]][:SLOTS]
        self.decoded.append(len(running))
        for left, place in running:
            left[place] -= 1
        done = [job for job, left in self._left if not any(left)]
        self._left = [(job, left) for job, left in self._left if any(left)]
        trajectories = [
            Episode.single_turn(job.prompt, Completion.of([5], [-1.0], "stop", 0)) for job in done for _ in job.requests
        ]
        report = Responses.of([job.number for job in done], trajectories, ["5"] * len(trajectories))
        n_running = sum(map(bool, (tokens for _, left in self._left for tokens in left)))
        return replace(report, n_running=n_running), Columns.of(trajectories) if trajectories else None


class OneByOne(WorkerGroup):
    """Two replicas that report in a given order."""

    def __init__(self, reports: list[tuple[int, Responses]]) -> None:
        self.reports = reports
        self.given: list[tuple[int, list[int]]] = []
        """Replica and new jobs of each call."""

    def __len__(self) -> int:
        return 2

    def keep_on(self, rank: int, method: Any, *args: Any, **kwargs: Any) -> KeptCall[Any]:
        self.given.append((rank, [job.number for job in args[0]]))
        return KeptCall(rank, None, None, "", 0.0)  # type: ignore[arg-type]

    def first_kept(self, calls: Sequence[KeptCall[Any]]) -> tuple[KeptCall[Any], Any]:
        rank, report = self.reports.pop(0)
        return next(call for call in calls if call.rank == rank), report


def jobs() -> list[Job]:
    prompt, request = Prompt(0, "", (3, 4), ""), GenerationRequest((3, 4), 0)
    return [Job(n, prompt, [request] * SIZE, SAMPLING) for n in range(N_JOBS)]


def test_a_slot_whose_request_has_ended_is_filled_before_its_group_is_done() -> None:
    workers = [TailedWorker(long=30) for _ in range(2)]
    stream = RolloutStream(LocalRollout(LocalGroup(workers)), SLOTS)
    stream.submit(jobs())
    done: list[int] = []
    while stream.has_work:
        done += [group.number for group in stream.advance()]
    assert sorted(done) == [job.number for job in jobs()]
    for worker in workers:
        # N_JOBS / 2 groups of a long request each: all of them are decoded while the first ones go on.
        assert len(worker.decoded) <= 30 + 2 * N_JOBS
        assert worker.begun == sorted(worker.begun), "jobs begin in their order"
        handed_out = worker.decoded[: len(worker.decoded) - 30]
        assert min(handed_out) >= SLOTS - 1, handed_out


def test_jobs_that_a_server_has_lost_go_on_before_those_that_it_was_to_get() -> None:
    working = replace(Responses.of([], [], []), n_running=SIZE)
    died = replace(Responses.of([], [], []), lost={0: jobs()[0].requests}, has_weights=False)
    group = OneByOne([(1, working), (1, working), (0, died), (1, working), (1, working)])
    stream = RolloutStream(LocalRollout(group), 2 * SIZE)  # type: ignore[arg-type]
    first, second, third, *_ = jobs()
    stream.submit([first, second])
    assert stream.advance() == []
    # The first replica is to get it with its next call, which the present one does not reach.
    stream.submit([third])
    while group.reports:
        assert stream.advance() == []
    assert group.given == [(0, [0]), (1, [1]), (1, []), (1, []), (1, [0])]


def test_equal_shares_are_dealt_at_once_and_cut_jobs() -> None:
    group = OneByOne([(0, replace(Responses.of([], [], []), n_running=1))])
    given: list[tuple[int, list[tuple[int, int, int]]]] = []

    def keep_on(rank: int, method: Any, jobs: Sequence[Job], seconds: float) -> KeptCall[Any]:
        given.append((rank, [(job.number, job.first, len(job.requests)) for job in jobs]))
        return KeptCall(rank, None, None, "", 0.0)  # type: ignore[arg-type]

    group.keep_on = keep_on  # type: ignore[method-assign,assignment]
    stream = RolloutStream(LocalRollout(group), capacity=None)  # type: ignore[arg-type]
    stream.submit(jobs()[:3])
    stream.advance()
    assert given == [(0, [(0, 0, SIZE), (1, 0, SIZE // 2)]), (1, [(1, SIZE // 2, SIZE // 2), (2, 0, SIZE)])]


def test_parts_that_failed_go_elsewhere_one_at_a_time_and_may_be_lost_there() -> None:
    """Of four episodes the first and the last two fail, then the server of the other replica dies with the first."""
    job, prompt = replace(jobs()[0], retries=1), jobs()[0].prompt
    good = Episode.single_turn(prompt, Completion.of([5], [-1.0], "stop", 0))
    bad = Episode.failed(prompt, "the board is away")
    begun = replace(job.requests[0], seed=7)
    nothing = Responses.of([], [], [])
    reports = [
        (0, Responses.of([0], [bad, good, bad, bad], ["5"] * SIZE)),
        (1, replace(nothing, lost={0: [begun]})),
        (1, Responses.of([0], [bad], ["5"])),
        (1, Responses.of([0], [good, good], ["5"] * 2)),
    ]
    group = OneByOne(reports)
    given: list[tuple[int, int, int]] = []

    def keep_on(rank: int, method: Any, jobs: Sequence[Job], seconds: float) -> KeptCall[Any]:
        given.extend((rank, job.first, len(job.requests)) for job in jobs)
        return KeptCall(rank, None, None, "", 0.0)  # type: ignore[arg-type]

    group.keep_on = keep_on  # type: ignore[method-assign,assignment]
    stream = RolloutStream(LocalRollout(group), 2 * SIZE)  # type: ignore[arg-type]
    stream.submit([job])
    answers: list[tuple[int, list[bool]]] = []
    whole = Group(prompt, job.requests, SAMPLING)
    while stream.has_work:
        answers += [(each.first, [sample.has_failed for sample in each.samples]) for each in stream.advance()]
        for lost in stream.take_lost():
            assert not whole.is_whole(lost.requests)
            whole.resume(lost)
    assert not group.reports
    assert given == [(0, 0, SIZE), (1, 0, 1), (1, 0, 1), (1, 2, 2)]
    assert sorted(answers) == [(0, [True]), (1, [False]), (2, [False, False])]
    assert whole.requests == [begun, *job.requests[1:]]


class Recording(WorkerGroup):
    """Replicas that note what they are given, and report that nothing is done."""

    def __init__(self, n: int) -> None:
        self.given: list[list[Job]] = [[] for _ in range(n)]
        self.slices: list[float] = []

    def __len__(self) -> int:
        return len(self.given)

    def keep_on(self, rank: int, method: Any, *args: Any, **kwargs: Any) -> KeptCall[Any]:
        self.given[rank] += args[0]
        self.slices.append(args[1])
        return KeptCall(rank, None, None, "", 0.0)  # type: ignore[arg-type]

    def first_kept(self, calls: Sequence[KeptCall[Any]]) -> tuple[KeptCall[Any], Any]:
        return calls[0], Responses.of([], [], [])


def handed_out(sizes: Sequence[int], loads: Sequence[int]) -> list[list[tuple[int, int, int]]]:
    """Return the parts of jobs, as (number, first, requests), that each of some replicas with requests gets at once."""
    group = Recording(len(loads))
    stream = RolloutStream(LocalRollout(group), 10_000)  # type: ignore[arg-type]
    stream._loads = list(loads)
    request = GenerationRequest((3, 4), 0)
    stream.submit([Job(n, Prompt(n, "", (3, 4), ""), [request] * size, SAMPLING) for n, size in enumerate(sizes)])
    stream.advance()
    return [[(job.number, job.first, len(job.requests)) for job in own] for own in group.given]


def lowest_peak(sizes: Sequence[int], loads: Sequence[int], *, whole: bool) -> int:
    """Return, by trying all ways, how many requests the replica has at least that has most of those that get some.

    Each whole job goes to one replica, or each request goes to the replica that has the fewest then.
    """
    ways = product(range(len(loads)), repeat=len(sizes)) if whole else [(None,) * sum(sizes)]
    peaks = []
    for targets in ways:
        after, got = list(loads), set[int]()
        for target, size in zip(targets, sizes if whole else [1] * sum(sizes), strict=True):
            place = after.index(min(after)) if target is None else target
            after[place] += size
            got.add(place)
        peaks.append(max(after[place] for place in got))
    return min(peaks)


@pytest.mark.parametrize("seed", range(60))
def test_no_replica_gets_many_more_requests_than_an_even_share_and_few_jobs_are_cut(seed: int) -> None:
    random = Random(seed)
    sizes = [random.choice([1, 4, 8, 16, 40])] * random.randint(1, 5)
    loads = [random.choice([0, 0, 3, 20, 60]) for _ in range(random.randint(1, 4))]
    given = handed_out(sizes, loads)
    begun = sorted((number, first + place) for parts in given for number, first, n in parts for place in range(n))
    assert begun == [(number, place) for number, size in enumerate(sizes) for place in range(size)]
    after = [load + sum(n for _, _, n in parts) for load, parts in zip(loads, given, strict=True)]
    most = max(n for n, parts in zip(after, given, strict=True) if parts)
    even = lowest_peak(sizes, loads, whole=False)
    assert most <= even + MOST_ABOVE
    n_parts = sum(map(len, given))
    if sizes[0] <= MOST_ABOVE:
        assert n_parts == len(sizes), "small jobs stay whole"
    if n_parts > len(sizes):
        assert lowest_peak(sizes, loads, whole=True) > even, "nothing is cut that whole jobs could share evenly"


def test_the_episodes_of_one_large_group_begin_on_all_replicas_but_those_that_are_loaded() -> None:
    assert handed_out([64], [0, 100, 0]) == [[(0, 0, 32)], [], [(0, 32, 32)]]
    assert handed_out([64], [0]) == [[(0, 0, 64)]]


@pytest.mark.parametrize(("n", "seconds"), [(1, 0.2), (20, 0.2), (100, 100 / 150), (1000, 1.0)])
def test_many_replicas_report_less_often_while_nothing_is_done(n: int, seconds: float) -> None:
    group = Recording(n)
    stream = RolloutStream(LocalRollout(group), SLOTS)  # type: ignore[arg-type]
    stream.submit(jobs()[:1])
    stream.advance()
    assert group.slices == [pytest.approx(seconds)]
