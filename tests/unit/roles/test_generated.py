"""What the driver makes of the reports of all replicas."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fivefold.batch import Columns
from fivefold.roles.remote_batch import RemoteBatch
from fivefold.roles.responses import Job, Responses, Work, answers_of, load_metrics
from fivefold.roles.rollout import ExpectedLengths
from fivefold.rollout.protocol import GenerationRequest, SamplingParams, ServerCounts
from fivefold.types import Episode, Prompt, Sample, Trajectory

SAMPLING = SamplingParams(16, 0, False, 1.0, 1.0, 0, (), ())


def episode(mask: list[bool], versions: list[int]) -> Episode:
    n = len(mask)
    trajectory = Trajectory(
        np.arange(n, dtype=np.int32),
        np.array(mask, dtype=np.bool_),
        np.zeros(n, dtype=np.float32),
        np.array(versions, dtype=np.int32),
    )
    return Episode((trajectory,), "stop")


def test_a_report_becomes_the_samples_of_its_jobs_and_reports_together_a_batch() -> None:
    prompts = [Prompt(index, f"prompt {index}", (1,), None) for index in range(3)]
    jobs = [Job(number, prompt, [GenerationRequest((1,), 0)], SAMPLING) for number, prompt in enumerate(prompts)]
    first = [episode([False, True, True], [-1, 4, 5]), episode([False, True], [-1, 5])]
    second = [episode([False], [-1])]  # nothing was sampled
    reports = [
        (Responses.of([2], second, [""], busy_s=1.0), "one replica's columns"),
        (Responses.of([1, 0], first[::-1], ["b", "a"], busy_s=4.0), "another one's"),
    ]
    made = [a for report, columns in reports for a in answers_of([jobs[n] for n in report.jobs], report, columns)]  # type: ignore[arg-type]
    in_order = sorted(made, key=lambda answer: answer.number)
    samples = [sample for answer in in_order for sample in answer.samples]
    assert [(s.prompt.index, s.response_text, s.n_tokens, s.n_sampled, s.versions) for s in samples] == [
        (0, "a", 3, 2, (4, 5)),
        (1, "b", 2, 1, (5, 5)),
        (2, "", 1, 0, (-1, -1)),
    ]
    batch = RemoteBatch.joined([answer.batch for answer in in_order])
    assert batch.lengths_N.tolist() == [3, 2, 1]
    assert batch.trained_N.tolist() == [2, 1, 0]
    pieces = [(piece.columns, piece.sequences_M.tolist()) for piece in batch.pieces]
    assert pieces == [("another one's", [1, 0]), ("one replica's columns", [2])]
    work = [Work.of(reports[0][0]), Work(), Work.of(reports[1][0])]
    assert load_metrics(work, 4.0) == {
        "replica_busy/mean": 1.25 / 3,
        "replica_busy/min": 0.0,
        "replica_tokens/min": 0.0,
        "replica_tokens/max": 3.0,
    }
    drafting = [
        replace(reports[0][0], counts=ServerCounts(6, 3, 10, 4)),
        replace(reports[1][0], counts=ServerCounts(2, 2, 30, 14)),
    ]
    metrics = load_metrics([Work.of(report) for report in drafting], 4.0)
    assert metrics["draft_acceptance"] == 5 / 8
    assert metrics["prefix_cache_hits"] == 18 / 40
    waiting = load_metrics([Work.of(replace(drafting[0], waited_s=1.0)), Work()], 4.0)
    assert waiting["environment_wait"] == 1 / 8
    assert Work.of(drafting[0]) - Work.of(drafting[0]) + Work.of(drafting[1]) == Work.of(drafting[1])
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
