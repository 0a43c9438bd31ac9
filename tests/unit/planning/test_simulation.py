"""The simulation of a look-ahead, against schedules that are worked out by hand and against formulas."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from statistics import fmean
from typing import Any

import pytest

from fivefold.layout.parser import parse_role
from fivefold.planning.simulation.lengths import Lengths, log_normal
from fivefold.planning.simulation.look_ahead import Split, fastest
from fivefold.planning.simulation.run import N_STEPS, N_WARM_UP, Outcome, OverlappedWeights, Setting, simulate

TEN = Lengths((10,))
LONG_TAIL = log_normal(100, 1000)
TWO_BY_TWO = Setting(
    batch_size=2,
    group_size=2,
    n_replicas=1,
    slots=4,
    token_seconds=(0.0, 1.0),
    train_seconds=5.0,
    update_seconds=1.0,
)
"""Steps of two prompts with two completions, all of which one replica decodes at the same time."""
MANY = Setting(
    batch_size=8,
    group_size=4,
    n_replicas=4,
    slots=16,
    token_seconds=tuple(0.01 + 0.001 * n for n in range(17)),
    train_seconds=4.0,
    update_seconds=0.5,
)


@dataclass(frozen=True)
class OfOneGroup(Lengths):
    """Lengths of a group's completions, the same for every group."""

    def draw(self, random: Random, n: int) -> list[int]:
        return list(self.values[:n])


def measured(outcome: Outcome) -> tuple[float, float, float, float, int]:
    return (
        outcome.seconds, outcome.idle_trainer, outcome.idle_rollout, outcome.staleness_mean, outcome.staleness_max
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({}, (16, 10 / 16, 6 / 16, 0, 0), id="10 s of generation, 5 s of training, 1 s of weights"),
        pytest.param({"shares_devices": True}, (16, 10 / 16, 6 / 16, 0, 0), id="in turn it is the same"),
        # A batch decodes for 10 s and stands still for 1 s, while the one before is trained.
        pytest.param({"max_age": 1}, (11, 5 / 11, 1 / 11, 1, 1), id="the replica is always at work"),
        # Five batches are in flight, which is more than the trainer needs: a batch decodes for 10 s in two steps.
        pytest.param({"max_age": 4, "slots": 99}, (6, 0, 1 / 6, 4, 4), id="the trainer is always at work"),
        # With weights that overlap the step, the trainer waits for the copy alone.
        pytest.param(
            {"max_age": 4, "slots": 99, "overlapped": OverlappedWeights(0.5, 2, 1)},
            (5.5, 0, 1 / 5.5, 4, 4),
            id="weights overlap the next step",
        ),
        pytest.param(
            {"max_age": 4, "slots": 99, "overlapped": OverlappedWeights(0.5, 9, 1)},
            (10.5, 0, 1 / 10.5, 4, 4),
            id="weights wait for those before",
        ),
        # Prompts begin 10.5 + 0.5 + 2 + 1 s after the step before the last began, and take 10 s: two steps take 24 s,
        # in each of which the trainer works for 11 s and the replica for 10 s.
        pytest.param(
            {"max_age": 1, "train_seconds": 10.5, "overlapped": OverlappedWeights(0.5, 2, 1)},
            (12, 1 / 12, 2 / 12, 1, 1),
            id="prompts wait for weights on their way",
        ),
        pytest.param(
            {"overlapped": OverlappedWeights(0.5, 9, 1)},
            (16, 10 / 16, 6 / 16, 0, 0),
            id="without a look-ahead the trainer waits",
        ),
        # Two batches decode in 10 s and are then trained one after the other. Between the two steps nothing decodes, so
        # the first batch of the next pair begins when its age is 0, and the second one when its age is 1.
        pytest.param(
            {"max_age": 1, "slots": 8, "shares_devices": True}, (11, 5 / 11, 6 / 11, 0.5, 1), id="pairs in turn"
        ),
    ],
)
def test_a_schedule_is_the_one_worked_out_by_hand(changes: dict[str, Any], expected: tuple[float, ...]) -> None:
    assert measured(simulate(replace(TWO_BY_TWO, **changes), TEN)) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("slots", "generation"),
    [
        (2, 2 * 2 + 8 * 1),  # both for two tokens, then one alone
        (1, (2 + 10) * 1),  # a group that is larger than the slots waits for itself
    ],
)
def test_the_time_of_a_token_depends_on_how_many_run(slots: int, generation: float) -> None:
    setting = replace(TWO_BY_TWO, batch_size=1, slots=slots, token_seconds=(0.0, 1.0, 2.0))
    assert simulate(setting, OfOneGroup((2, 10))).seconds == pytest.approx(generation + 5 + 1)


def test_a_slot_is_filled_when_its_completion_ends() -> None:
    """Two groups of lengths 2 and 10 on three slots: the second long one begins after 2 tokens, beside the first."""
    setting = replace(TWO_BY_TWO, batch_size=2, slots=3, train_seconds=0.0, update_seconds=0.0)
    assert simulate(setting, OfOneGroup((2, 10))).seconds == pytest.approx(2 + 10)
    # All slots are always at work: two steps have 2 * 2 * (2 + 10) tokens.
    look_ahead = simulate(replace(setting, max_age=4), OfOneGroup((2, 10)), n_steps=30)
    assert look_ahead.seconds == pytest.approx(2 * (2 + 10) / 3, rel=0.03)


def test_reading_interrupted_requests_anew_costs_time() -> None:
    """Each batch is interrupted after 5 of its 10 tokens, or as much later as the reading before took."""
    kept = simulate(replace(TWO_BY_TWO, max_age=1), TEN)
    read = simulate(replace(TWO_BY_TWO, max_age=1, reread_seconds=0.01, prompt_tokens=45), TEN)
    assert read.seconds == pytest.approx(kept.seconds + 0.01 * 4 * (5 + 45))


def test_log_probs_take_time_with_a_look_ahead_alone() -> None:
    """Four requests run at any time."""
    for age, token in ((0, 1.0), (1, 2.0)):
        slower = replace(TWO_BY_TWO, max_age=age, logprob_seconds=0.25)
        assert simulate(slower, TEN) == simulate(replace(TWO_BY_TWO, max_age=age, token_seconds=(0.0, token)), TEN)


@pytest.mark.parametrize("shares", [False, True])
def test_without_a_look_ahead_a_step_is_the_longest_answer_and_the_training(shares: bool) -> None:
    setting = replace(MANY, slots=8, token_seconds=(0.0, 0.02), shares_devices=shares)
    random = Random(0)
    longest = [max(max(LONG_TAIL.draw(random, 4)) for _ in range(8)) for _ in range(N_WARM_UP + N_STEPS)]
    expected = 0.02 * fmean(longest[N_WARM_UP:]) + 4.0 + 0.5
    assert simulate(setting, LONG_TAIL).seconds == pytest.approx(expected)


@pytest.mark.parametrize("age", [0, 1, 3])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"shares_devices": True},
        {"slots": 4},
        {"slots": 3},
        {"max_running": 3},
        {"reread_seconds": 1e-4, "n_replicas": 3},
        {"train_seconds": 0.0, "update_seconds": 0.0},
        {"overlapped": OverlappedWeights(0.1, 3.0, 0.4)},
    ],
)
def test_every_prompt_is_finished_once_and_young_enough(changes: dict[str, Any], age: int) -> None:
    """`Turns` raises if a prompt is finished twice."""
    outcome = simulate(replace(MANY, max_age=age, **changes), LONG_TAIL)
    assert sorted(outcome.finished) == list(range(8 * (N_WARM_UP + N_STEPS)))
    assert 0 <= outcome.staleness_mean <= outcome.staleness_max <= age
    for share in (outcome.idle_trainer, outcome.idle_rollout):
        assert -1e-9 <= share <= 1 + 1e-9


def test_more_of_anything_that_helps_never_makes_steps_slower() -> None:
    # A token takes as long however many run, so that prompts which begin early take nothing from others.
    plenty = replace(MANY, slots=10_000, token_seconds=(0.0, 0.02))
    by_age = [simulate(replace(plenty, max_age=age), LONG_TAIL).seconds for age in (0, 1, 2, 4)]
    by_replicas = [simulate(replace(MANY, n_replicas=n, max_age=1), LONG_TAIL).seconds for n in (1, 2, 4, 8)]
    by_training = [simulate(replace(MANY, train_seconds=s, max_age=1), LONG_TAIL).seconds for s in (20, 9, 4, 0)]
    for seconds in (by_age, by_replicas, by_training):
        assert all(later <= earlier * 1.001 for earlier, later in pairwise(seconds)), seconds
        assert seconds[-1] < 0.7 * seconds[0]


def test_a_long_look_ahead_reaches_the_bound_of_the_slower_side() -> None:
    single = replace(MANY, batch_size=32, group_size=1, max_age=30)
    for train, tolerance in ((20.0, 1e-9), (0.1, 0.1)):
        setting = replace(single, train_seconds=train)
        seconds = simulate(setting, LONG_TAIL, n_steps=30).seconds
        assert seconds == pytest.approx(setting.least_seconds(LONG_TAIL.mean), rel=tolerance)


def test_the_fastest_split_is_that_of_a_look_at_all() -> None:
    splits = [
        Split(
            parse_role(f"megatron:d{n}"),
            parse_role(f"vllm:d{8 - n}"),
            replace(MANY, n_replicas=8 - n, train_seconds=24.0 / n),
        )
        for n in range(1, 8)
    ]
    choices = list(fastest(splits, LONG_TAIL, (0, 2)))
    for choice in choices:
        all_seconds = [simulate(replace(split.setting, max_age=choice.max_age), LONG_TAIL).seconds for split in splits]
        assert choice.outcome.seconds == min(all_seconds)
    assert [choice.gain for choice in choices] == [1.0, choices[0].outcome.seconds / choices[1].outcome.seconds]
    assert list(fastest([], LONG_TAIL, (0, 2))) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slots": 0}, "slots is 0"),
        ({"token_seconds": (0.0,)}, "token_seconds"),
        ({"train_seconds": -1.0}, "at least 0"),
        ({"max_age": -1}, "at least 0"),
        ({"overlapped": OverlappedWeights(0.1, -1.0, 0.4)}, "at least 0"),
        ({"overlapped": OverlappedWeights(0.1, 1.0, 0.4), "shares_devices": True}, "separate devices"),
    ],
)
def test_a_setting_that_cannot_be_is_an_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(MANY, **changes)


def test_ages_and_times_are_finite_when_nothing_takes_time() -> None:
    outcome = simulate(replace(MANY, train_seconds=0.0, update_seconds=0.0, max_age=2), Lengths((1,)))
    assert math.isfinite(outcome.seconds)
    assert outcome.seconds > 0
