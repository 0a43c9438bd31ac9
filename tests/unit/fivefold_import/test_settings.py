"""Warm-up steps and the least learning rate, which become shares."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold_import.draft import Draft
from fivefold_import.settings import min_lr, warmup

SHARE = "actor.optimizer.warmup_steps_proportion"


def counted_back(steps: int, total: int) -> int:
    """Return the steps that the trainer makes of the share, counted as `fivefold.engine.state.optimizer_state` does."""
    draft = Draft({"steps": steps}, {})
    warmup(draft, "steps", total)
    return math.ceil(round(draft.recipe[SHARE] * total, 6))


def test_warmup_steps_survive_as_a_share_of_all_steps() -> None:
    for total in (*range(1, 130), 997, 1000, 1875, 7473, 30_000):
        for steps in {*range(1, min(total, 60) + 1), total // 3 or 1, total}:
            assert counted_back(steps, total) == steps, (steps, total)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 1_000_000).flatmap(lambda total: st.tuples(st.integers(1, total), st.just(total))))
def test_warmup_steps_of_long_runs_survive(pair: tuple[int, int]) -> None:
    assert counted_back(*pair) == pair[0]


def test_a_warmup_longer_than_the_run_is_all_of_it() -> None:
    assert counted_back(20, 10) == 10


def test_the_least_rate_is_a_share_of_the_peak() -> None:
    for least, share in {1e-7: 0.1, 2e-7: 0.2, 0.0: 0.0, 1e-9: 0.001}.items():
        draft = Draft({"lr": 1e-6, "min_lr": least}, {})
        min_lr(draft, "min_lr", "lr")
        assert draft.recipe["actor.optimizer.min_lr_ratio"] == share


def test_a_rate_of_0_has_no_share() -> None:
    draft = Draft({"lr": 0.0, "min_lr": 1e-7}, {})
    min_lr(draft, "min_lr", "lr")
    assert draft.entries[0].outcome == "implied"
