from __future__ import annotations

import threading

import pytest

from fivefold.observe import timers as timers_module
from fivefold.observe.timers import PhaseTimers


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timers_module, "time", clock)
    return clock


def test_seconds_add_up_per_phase_and_start_again_after_take(clock: Clock) -> None:
    timers = PhaseTimers()
    for seconds in (2.0, 3.0):
        with timers.phase("rollout"):
            clock.now += seconds
        clock.now += 100.0
    with timers.phase("train"):
        clock.now += 1.0
    seconds_of = timers.take()
    assert seconds_of == {"rollout": 5.0, "train": 1.0}
    assert list(seconds_of) == ["rollout", "train"]
    assert timers.take() == {}


def test_the_seconds_of_nested_phases_add_up_to_the_time_that_passed(clock: Clock) -> None:
    timers = PhaseTimers()
    with timers.phase("train"):
        for name in ("reference", "old log-probs"):
            clock.now += 1.0
            with timers.phase(name):
                clock.now += 10.0
                with timers.phase("transfer"):
                    clock.now += 100.0
        clock.now += 0.5
    assert timers.take() == {"train": 2.5, "reference": 10.0, "old log-probs": 10.0, "transfer": 200.0}
    assert clock.now == 222.5


def test_the_phase_under_way_changes_whenever_one_begins_or_ends(clock: Clock) -> None:
    timers = PhaseTimers()
    assert timers.current == timers.under_way == "setup"
    with timers.phase("train"):
        assert timers.under_way == "train"
        clock.now += 2.0
        with timers.phase("old log-probs"):
            assert timers.current == timers.under_way == "old log-probs"
            assert timers.since == 2.0
            clock.now += 3.0
        assert timers.current == timers.under_way == "train"
    assert timers.current == timers.under_way == "setup"
    assert (timers.took["old log-probs"], timers.ended["old log-probs"]) == (3.0, 5.0)


def test_phases_of_several_threads_are_under_way_together() -> None:
    timers, entered, leave = PhaseTimers(), threading.Event(), threading.Event()

    def generate() -> None:
        with timers.phase("rollout"):
            entered.set()
            leave.wait()

    thread = threading.Thread(target=generate)
    with timers.phase("train"):
        thread.start()
        entered.wait()
        assert (timers.under_way, timers.current) == ("train + rollout", "train")
        leave.set()
        thread.join()
        assert timers.under_way == "train"


def test_after_a_failure_the_current_phase_is_the_one_that_failed() -> None:
    timers = PhaseTimers()
    with pytest.raises(KeyError), timers.phase("train"):
        raise KeyError
    assert timers.current == "train"
    assert timers.take() == {}
