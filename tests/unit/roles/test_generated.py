"""The reports of all replicas are combined in the order of the requests."""

from __future__ import annotations

import numpy as np

from fivefold.roles.responses import Responses, generated
from fivefold.roles.rollout import ExpectedLengths
from fivefold.types import Columns, Prompt, Sample, Trajectory


def trajectory(group: int, mask: list[bool], versions: list[int]) -> Trajectory:
    n = len(mask)
    return Trajectory(
        group,
        "",
        "stop",
        np.arange(n, dtype=np.int32),
        np.array(mask, dtype=np.bool_),
        np.zeros(n, dtype=np.float32),
        np.array(versions, dtype=np.int32),
    )


def test_reports_of_all_replicas_become_samples_in_the_order_of_the_requests() -> None:
    prompts = [Prompt(index, f"prompt {index}", (1,), None) for index in range(3)]
    first = [trajectory(0, [False, True, True], [-1, 4, 5]), trajectory(1, [False, True], [-1, 5])]
    second = [trajectory(2, [False], [-1])]  # nothing was sampled
    reports = [
        [(Responses.of([2], second, [""], busy_s=1.0), "the first replica's columns")],
        [],
        [
            (Responses.of([1], first[1:], ["b"], busy_s=3.0), "the third replica's first columns"),
            (Responses.of([0], first[:1], ["a"], busy_s=1.0), "the third replica's second columns"),
        ],
    ]
    made = generated(prompts, reports, 4.0)  # type: ignore[arg-type]
    assert [(s.prompt.index, s.response_text, s.n_tokens, s.n_sampled, s.versions) for s in made.samples] == [
        (0, "a", 3, 2, (4, 5)),
        (1, "b", 2, 1, (5, 5)),
        (2, "", 1, 0, (-1, -1)),
    ]
    assert made.batch.lengths_N.tolist() == [3, 2, 1]
    assert made.batch.trained_N.tolist() == [2, 1, 0]
    pieces = [(piece.columns, piece.sequences_M.tolist()) for piece in made.batch.pieces]
    assert pieces == [
        ("the first replica's columns", [2]),
        ("the third replica's first columns", [1]),
        ("the third replica's second columns", [0]),
    ]
    assert made.metrics == {
        "replica_busy/mean": 1.25 / 3,
        "replica_busy/min": 0.0,
        "replica_tokens/min": 0.0,
        "replica_tokens/max": 3.0,
    }
    assert Columns.of(first).lengths_N.tolist() == [3, 2]


def test_a_prompt_is_expected_to_be_answered_at_the_length_of_last_time() -> None:
    prompts = [Prompt(0, "", (1, index), None) for index in range(3)]
    expected = ExpectedLengths()
    assert expected.of(prompts[0]) == 0
    lengths = {0: [4, 8], 1: [10, 20]}
    expected.learn([Sample(prompts[i], "", "stop", 30, n, (0, 0)) for i, row in lengths.items() for n in row])
    assert [expected.of(prompt) for prompt in prompts] == [6, 15, 10.5]
    expected.learn([Sample(prompts[0], "", "stop", 30, 2, (0, 0))])
    assert expected.of(prompts[0]) == 2
