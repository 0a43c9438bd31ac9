"""The reports of all replicas are combined in the order of the replicas."""

from __future__ import annotations

import numpy as np

from fivefold.roles.rollout import Responses, generated
from fivefold.types import Columns, Prompt, Trajectory


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


def test_reports_of_all_replicas_become_samples_and_pieces_in_order() -> None:
    prompts = [Prompt(index, f"prompt {index}", (1,), None) for index in range(3)]
    first = [trajectory(0, [False, True, True], [-1, 4, 5]), trajectory(1, [False, True], [-1, 5])]
    second = [trajectory(2, [False], [-1])]  # nothing was sampled
    reports = [
        (Responses.of(first, ["a", "b"]), "the first replica's columns"),
        (Responses.of([], []), None),
        (Responses.of(second, [""]), "the third replica's columns"),
    ]
    made = generated(prompts, reports)  # type: ignore[arg-type]
    assert [(s.prompt.index, s.response_text, s.n_tokens, s.n_sampled, s.versions) for s in made.samples] == [
        (0, "a", 3, 2, (4, 5)),
        (1, "b", 2, 1, (5, 5)),
        (2, "", 1, 0, (-1, -1)),
    ]
    assert made.batch.lengths_N.tolist() == [3, 2, 1]
    assert made.batch.trained_N.tolist() == [2, 1, 0]
    pieces = [(piece.columns, piece.sequences_M.tolist()) for piece in made.batch.pieces]
    assert pieces == [("the first replica's columns", [0, 1]), ("the third replica's columns", [2])]
    assert Columns.of(first).lengths_N.tolist() == [3, 2]
