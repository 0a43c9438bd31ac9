from __future__ import annotations

import time

import pytest

from fivefold.observe.timers import PhaseTimers


def test_seconds_add_up_per_phase_and_start_again_after_take() -> None:
    timers = PhaseTimers()
    for _ in range(2):
        with timers.phase("rollout"):
            time.sleep(0.02)
    with timers.phase("train"):
        time.sleep(0.01)
    seconds = timers.take()
    assert list(seconds) == ["rollout", "train"]
    assert 0.04 <= seconds["rollout"] < 0.2
    assert 0.01 <= seconds["train"] < 0.1
    assert timers.take() == {}


def test_nested_phases_and_who_is_told() -> None:
    told: list[str] = []
    timers = PhaseTimers(on_change=told.append)
    assert timers.current == "setup"
    with timers.phase("train"):
        with timers.phase("old log-probs"):
            assert timers.current == "old log-probs"
        assert timers.current == "train"
    assert told == ["train", "old log-probs", "train", "setup"]
    assert set(timers.take()) == {"train", "old log-probs"}


def test_a_failure_leaves_the_phase_it_was_in() -> None:
    timers = PhaseTimers()
    with pytest.raises(KeyError), timers.phase("train"):
        raise KeyError
    assert timers.current == "train"
    assert timers.take() == {}
