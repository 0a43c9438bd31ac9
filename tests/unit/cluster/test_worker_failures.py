"""A worker's failure raises an error in the driver within seconds, with role, rank and phase, and ends all workers."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from engines import SOON_S, Engine, GlooEngine, broken_build, gone, wait_for_file

from fivefold.cluster import failures, watch
from fivefold.cluster.errors import PhaseTimeout, WorkerError
from fivefold.cluster.group import WorkerGroup
from fivefold.cluster.role import Role
from fivefold.cluster.session import Session
from fivefold.layout.placement import Device
from fivefold.observe.timers import PhaseTimers
from tests.rows import long

FORKS_WORKERS = True


@pytest.fixture(autouse=True)
def _machine_may_be_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let stacks, and the cause of a rank that has lost a peer, take as long as they need."""
    monkeypatch.setattr(failures, "STACK_TIMEOUT_S", SOON_S)
    monkeypatch.setattr(watch, "SETTLE_S", (*watch.SETTLE_S[:2], SOON_S))


def launch(session: Session, n: int, name: str = "actor") -> WorkerGroup:
    return session.launch(Role(name, [Device(0, rank) for rank in range(n)], Engine))[name]


def test_a_rank_that_raises_ends_the_wait_for_the_others(session: Session) -> None:
    group = launch(session, 2)
    pids = group.call(Engine.pid)
    began = time.monotonic()
    with pytest.raises(WorkerError) as caught, PhaseTimers.phase(session.timers, "train"):
        group.call(Engine.raise_on, 1, "no good")
    assert time.monotonic() - began < SOON_S
    error = caught.value
    assert (error.role, error.rank, error.phase) == ("actor", 1, "train")
    assert error.traceback_text.startswith("Traceback")
    assert "ValueError: no good" in error.traceback_text
    assert "raise_on" in error.traceback_text
    assert "cluster/worker.py" not in error.traceback_text
    assert "actor rank 1 failed in phase 'train'" in str(error)
    assert str(error.log) in str(error)
    assert "ValueError: no good" in error.log.read_text()
    assert gone(pids)


def test_the_cause_is_named_first_and_its_consequences_after_it(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver hears of the cause after its consequence."""
    settle, has_failed = watch.Watch._settle, tmp_path / "rank 0 has failed"

    def settled(self: watch.Watch, first: failures.Failure) -> list[failures.Failure]:
        has_failed.touch()
        return settle(self, first)

    monkeypatch.setattr(watch.Watch, "_settle", settled)
    with pytest.raises(WorkerError) as caught:
        launch(session, 2).call(Engine.raise_both, 1, str(has_failed))
    assert caught.value.rank == 1
    assert "Failed with it: actor rank 0" in str(caught.value)


def test_an_exception_that_cannot_be_pickled_is_reported_as_text(session: Session) -> None:
    with pytest.raises(WorkerError, match="cannot travel"):
        launch(session, 1).call(Engine.raise_unpicklable)


@pytest.mark.parametrize("number", [signal.SIGKILL, *long(signal.SIGSEGV)])
def test_a_process_that_dies_ends_the_wait_for_the_others(session: Session, number: signal.Signals) -> None:
    group = launch(session, 2)
    pids = group.call(Engine.pid)
    began = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        group.call(Engine.kill_itself, 1, number)
    assert time.monotonic() - began < SOON_S
    assert (caught.value.role, caught.value.rank) == ("actor", 1)
    assert "died without a traceback" in str(caught.value)
    assert ("last words" if number == signal.SIGKILL else "Segmentation fault") in str(caught.value)
    assert "not installed" not in str(caught.value)
    assert caught.value.log.read_text().count("not installed") == 4
    assert gone(pids)


def test_a_peer_that_is_killed_in_a_collective_is_named(session: Session) -> None:
    group = session.launch(Role("actor", [Device(0, 0)] * 2, GlooEngine, distributed=True))["actor"]
    with pytest.raises(WorkerError) as caught:
        group.call(GlooEngine.barrier_without, 1, signal.SIGKILL)
    assert caught.value.rank == 1


def test_a_collective_that_waits_too_long_names_the_rank_that_is_missing_and_where_it_is(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "SETTLE_S", (0.0, 0.0, 0.0))  # no cause follows
    group = session.launch(Role("actor", [Device(0, 0)] * 2, GlooEngine, distributed=True))["actor"]
    began = time.monotonic()
    with pytest.raises(WorkerError) as caught, PhaseTimers.phase(session.timers, "train"):
        group.call(GlooEngine.reduce_without, 1, 1.0, str(tmp_path))
    assert time.monotonic() - began < SOON_S
    assert (caught.value.role, caught.value.rank, caught.value.phase) == ("actor", 0, "train")
    assert "all_reduce" in caught.value.traceback_text
    assert "no answer from actor rank 1." in str(caught.value)
    assert "hang_here" in str(caught.value)


def test_a_role_that_dies_ends_the_wait_for_another_role(session: Session) -> None:
    devices = [Device(0, 0)]
    groups = session.launch(Role("actor", devices, Engine), Role("rollout", devices, Engine))
    groups["rollout"].start(Engine.kill_itself, 0, signal.SIGKILL)
    with pytest.raises(WorkerError) as caught:
        groups["actor"].call(Engine.hang_here)
    assert caught.value.role == "rollout"


def test_a_failure_ends_the_waits_of_all_threads(session: Session) -> None:
    devices = [Device(0, 0)]
    groups = session.launch(Role("actor", devices, Engine), Role("rollout", devices, Engine))

    def hang(_: int) -> BaseException | None:
        try:
            groups["actor"].call(Engine.hang_here)
        except WorkerError as error:
            return error
        return None

    with ThreadPoolExecutor() as threads:
        waiting = [threads.submit(hang, 0), threads.submit(hang, 1)]
        with pytest.raises(WorkerError) as caught:
            groups["rollout"].call(Engine.raise_on, 0, "no good")
        assert [thread.result(timeout=SOON_S) for thread in waiting] == [caught.value] * 2
    # Threads that call later, as those above may, get the same failure.
    assert hang(2) is caught.value
    assert caught.value.role == "rollout"


def test_a_time_out_names_the_ranks_without_an_answer_and_their_stacks(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = launch(session, 2)
    pids = group.call(Engine.pid)
    with PhaseTimers.phase(session.timers, "weight sync"):
        running = group.start(Engine.hang_here, str(tmp_path))
    for rank in range(2):
        wait_for_file(tmp_path / f"{rank} hangs")
    monkeypatch.setattr(session, "timeout_s", 1.0)
    with pytest.raises(PhaseTimeout) as caught:
        running.wait()
    message = str(caught.value)
    assert caught.value.phase == "weight sync"
    assert "phase 'weight sync' took longer than" in message
    assert "scheduler.timeout_s=1 s" in message
    assert "no answer from actor rank 0, actor rank 1" in message
    assert "in hang_here" in message
    assert gone(pids)


def test_a_build_that_fails_on_one_rank_is_named(session: Session) -> None:
    with pytest.raises(WorkerError, match="no such checkpoint") as caught:
        session.launch(Role("actor", [Device(0, 0)] * 2, broken_build, args=(1,)))
    assert caught.value.rank == 1


@pytest.mark.parametrize("failing_rank", [1, *long(0)])
def test_a_generator_that_raises_ends_the_stream_and_is_named(session: Session, failing_rank: int) -> None:
    stream = launch(session, 2).stream(Engine.items_then_raise, 4, failing_rank)
    with pytest.raises(WorkerError, match="the generator broke") as caught:
        list(stream)
    assert caught.value.rank == failing_rank


def test_a_reader_that_raises_ends_the_feed_and_is_named(session: Session) -> None:
    actor, rollout = launch(session, 2), launch(session, 2, "rollout")
    with pytest.raises(WorkerError, match="cannot digest it") as caught:
        rollout.feed(Engine.raise_while_fed, actor.stream(Engine.items, 10))
    assert caught.value.role == "rollout"


def test_a_failure_on_one_rank_ends_the_wait_for_another(session: Session) -> None:
    group = launch(session, 2)
    calls = [group.keep_on(0, Engine.work_until_told, 3), group.keep_on(1, Engine.work, "job 7 cannot be done")]
    with pytest.raises(WorkerError, match="job 7 cannot be done"):
        group.first_kept(calls)


def test_a_log_that_cannot_be_written_is_told_with_the_fix(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").touch()
    monkeypatch.setattr(session, "logs", tmp_path / "run" / "logs")
    with pytest.raises(WorkerError, match=r"cannot write its log on this machine .*: set cluster.fileroot") as caught:
        launch(session, 1)
    assert (caught.value.role, caught.value.rank) == ("actor", 0)
    assert "killed" not in str(caught.value)
