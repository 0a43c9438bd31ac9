"""A command with a time limit ends while another step and its checkpoint would still fit in."""

from __future__ import annotations

import pytest

from fivefold.checkpoints.checkpointer import CLOSING_S, LONGER, TimeLimit


def steps_until_the_end(limit_s: float | None, step_s: list[float], write_s: float) -> int | None:
    """Return the number of steps after which the run ends; None: it makes all of them."""
    now = 0.0
    limit = TimeLimit(limit_s, began=0.0, clock=lambda: now)
    for number, seconds in enumerate(step_s, start=1):
        now += seconds
        if limit.is_near(write_s):
            return number
    return None


def test_without_a_limit_all_steps_are_made() -> None:
    assert steps_until_the_end(None, [1e6] * 3, write_s=1e6) is None


@pytest.mark.parametrize("write_s", [0.0, 30.0])
def test_the_longest_step_and_the_checkpoint_still_fit_in(write_s: float) -> None:
    seconds = [10.0, 40.0, *[10.0] * 20]
    ended = steps_until_the_end(200.0, seconds, write_s)
    assert ended is not None
    needed = LONGER * (40.0 + write_s) + CLOSING_S
    assert sum(seconds[:ended]) + needed > 200.0
    assert sum(seconds[: ended - 1]) + needed <= 200.0
    assert sum(seconds[:ended]) + 40.0 * (LONGER - 1) + LONGER * write_s < 200.0, "its own checkpoint fits in"


def test_a_limit_that_is_shorter_than_a_step_ends_the_run_after_it() -> None:
    assert steps_until_the_end(5.0, [10.0, 10.0], write_s=0.0) == 1
