"""Trajectories, columns of several of them laid end to end, and batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fivefold.batch import Batch, Columns, Totals
from fivefold.types import NOT_SAMPLED, UNKNOWN_EXPERT, Completion, Episode, Prompt, Sample, Trajectory


def trajectory(prompt: tuple[int, ...], tokens: tuple[int, ...], logprobs: tuple[float, ...]) -> Trajectory:
    return Trajectory.single_turn(problem(prompt), Completion.of(tokens, logprobs, "stop", version=7))


def episode(*trajectories: Trajectory) -> Episode:
    return Episode(trajectories, "stop")


def problem(prompt: tuple[int, ...]) -> Prompt:
    return Prompt(3, "", prompt, ground_truth=None, data_source="sums")


def test_a_single_turn_is_the_prompt_with_its_completion() -> None:
    made = trajectory((1, 2, 3), (7, 8), (-0.5, -0.25))
    assert made.tokens_T.tolist() == [1, 2, 3, 7, 8]
    assert made.mask_T.tolist() == [False, False, False, True, True]
    assert made.logprobs_T.tolist() == [0, 0, 0, -0.5, -0.25]
    assert made.versions_T.tolist() == [NOT_SAMPLED] * 3 + [7, 7]
    assert made.routes_TLK is None
    arrays = (made.tokens_T, made.mask_T, made.logprobs_T, made.versions_T)
    assert [array.dtype for array in arrays] == [np.int32, np.bool_, np.float32, np.int32]


def test_every_token_keeps_its_own_version_and_its_routes() -> None:
    tokens, versions = np.array([7, 8], np.int32), np.array([4, 5], np.int32)
    routes = np.arange(3 * 3 * 2, dtype=np.int16).reshape(3, 3, 2)  # of 3 MoE layers, the best 2 experts
    completion = Completion(tokens, np.zeros(2, np.float32), versions, "length", routes)
    made = Trajectory.single_turn(problem((1,)), completion)
    assert made.versions_T.tolist() == [NOT_SAMPLED, 4, 5]
    assert made.routes_TLK is not None
    assert made.routes_TLK.dtype == np.int16
    assert made.routes_TLK.tolist() == routes.tolist()


def test_trajectories_that_cannot_be_trained_are_refused() -> None:
    with pytest.raises(ValueError, match="prompt 3 has no tokens"):
        trajectory((), (1,), (0.0,))
    with pytest.raises(ValueError, match="prompt 3 has 2 tokens, but 1 log-probs"):
        trajectory((1,), (1, 2), (0.0,))
    without_route = Completion(*np.zeros((3, 2), np.int32), "stop", np.zeros((1, 3, 2), np.int16))
    with pytest.raises(ValueError, match="prompt 3 and its completion have 1 and 2 tokens, but 1 routes"):
        Trajectory.single_turn(problem((1,)), without_route)
    with pytest.raises(ValueError, match="must have one length"):
        Trajectory(np.zeros(3, np.int32), np.zeros(2, np.bool_), np.zeros(3), np.zeros(3, np.int32))
    with pytest.raises(ValueError, match=r"must have one length.*'routes_TLK': 2"):
        Trajectory(*np.zeros((4, 3), np.int32), np.zeros((2, 1, 1), np.int16))


def test_trajectories_of_one_and_several_turns_are_laid_end_to_end() -> None:
    mask = np.array([False, True, False, True])  # a prompt, a response, a tool's answer, a response
    routes = np.arange(4 * 2 * 3, dtype=np.int16).reshape(4, 2, 3)
    versions = np.array([-1, 4, -1, 5], np.int32)
    turns = Trajectory(np.arange(4, dtype=np.int32), mask, -mask.astype(np.float32), versions, routes)
    columns = Columns.of([episode(trajectory((5,), (6,), (-1.0,))), episode(turns)])
    assert columns.lengths_N.tolist() == [2, 4]
    assert columns.values["tokens"].tolist() == [5, 6, 0, 1, 2, 3]
    assert columns.values["mask"].tolist() == [False, True, *mask]
    assert columns.values["rollout_logprobs"].tolist() == [0, -1, 0, -1, 0, -1]
    assert columns.values["versions"].tolist() == [-1, 7, *versions]
    assert columns.values["routes"].tolist() == [*[[[UNKNOWN_EXPERT] * 3] * 2] * 2, *routes.tolist()]
    assert "routes" not in Columns.of([episode(trajectory((5,), (6,), (-1.0,)))]).values
    assert columns.cuts is None
    assert Columns.of([episode(turns), episode(turns)]).values["routes"].shape == (8, 2, 3)


def test_an_episode_of_several_sequences_is_one_row_with_cuts() -> None:
    one, two = trajectory((1, 2), (7, 8), (-0.5, -0.25)), trajectory((1, 2, 3), (9,), (-0.125,))
    columns = Columns.of([episode(one, two), episode(two)])
    assert columns.lengths_N.tolist() == [8, 4]
    assert columns.cuts == ((4, 4), (4,))
    assert columns.values["tokens"].tolist() == [1, 2, 7, 8, 1, 2, 3, 9, 1, 2, 3, 9]
    tokens_T, mask_T = torch.tensor(columns.values["tokens"]), torch.tensor(columns.values["mask"]).float()
    batch = Batch((8, 4), tokens_T, mask_T, cuts=columns.cuts)
    assert batch.sequence_lengths == (4, 4, 4)
    assert batch.totals() == Totals(n_sequences=2, n_tokens=12, n_trained_tokens=4, n_trained_sequences=2)
    assert batch.select([1, 0]).cuts == ((4,), (4, 4))
    with pytest.raises(ValueError, match="do not sum to the lengths"):
        Batch((8, 4), tokens_T, mask_T, cuts=((4, 3), (4,)))
    with pytest.raises(ValueError, match="has no trajectory"):
        episode()


def test_a_sample_adds_its_rewards_up() -> None:
    sample = Sample(Prompt(0, "", (1,), None), "two", "stop", n_tokens=2, n_sampled=1, versions=(0, 0))
    assert sample.reward == 0
    judged = sample.rewarded({"math": 1.0}).rewarded({"format": -0.25})
    assert (judged.reward, judged.rewards) == (0.75, {"math": 1.0, "format": -0.25})


def test_a_batch_counts_its_totals_and_refuses_fields_of_another_length() -> None:
    tokens, mask = torch.arange(5), torch.tensor([0.0, 1, 1, 0, 0])
    batch = Batch((3, 2), tokens, mask, {"routes": torch.zeros(5, 2, 3)})
    assert batch.totals() == Totals(n_sequences=2, n_tokens=5, n_trained_tokens=2, n_trained_sequences=1)
    assert batch.select([1]).fields["routes"].shape == (2, 2, 3)
    with pytest.raises(ValueError, match=r"Batch.values has shape \(4,\).*must be \(5, ...\)"):
        batch.with_fields(values=torch.zeros(4))
    with pytest.raises(ValueError, match=r"Batch.mask_T has shape \(5, 1\)"):
        Batch((3, 2), tokens, mask[:, None])
