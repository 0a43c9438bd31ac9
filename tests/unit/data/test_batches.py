"""From samples to a ragged batch and its mini-batches."""

from __future__ import annotations

import pytest
import torch

from fivefold.data.batches import batch_of, group_ids, minibatches
from fivefold.types import Completion, Prompt, Sample


def sample(index: int, prompt: tuple[int, ...], tokens: tuple[int, ...], logprobs: tuple[float, ...]) -> Sample:
    return Sample(Prompt(index, "", prompt, ground_truth=None), Completion(tokens, logprobs, "stop", 0), "", 0.0)


def test_prompts_and_completions_lie_end_to_end() -> None:
    samples = [sample(4, (1, 2, 3), (7, 8), (-0.5, -0.25)), sample(4, (1,), (), ()), sample(2, (5,), (6,), (-1.0,))]
    batch = batch_of(samples)
    assert batch.lengths == (5, 1, 2)
    assert batch.tokens_T.tolist() == [1, 2, 3, 7, 8, 1, 5, 6]
    assert batch.mask_T.tolist() == [0, 0, 0, 1, 1, 0, 0, 1]
    assert batch.fields["rollout_logprobs"].tolist() == [0, 0, 0, -0.5, -0.25, 0, 0, -1.0]
    assert (batch.tokens_T.dtype, batch.mask_T.dtype) == (torch.int64, torch.float32)
    assert group_ids(samples) == [4, 4, 2]


def test_samples_that_cannot_be_trained_are_errors() -> None:
    with pytest.raises(ValueError, match="prompt 3 has no tokens"):
        batch_of([sample(3, (), (1,), (0.0,))])
    with pytest.raises(ValueError, match="prompt 3 has 2 tokens, but 1 log-probs"):
        batch_of([sample(3, (1,), (1, 2), (0.0,))])


def test_minibatches_hold_whole_groups_and_each_sample_once() -> None:
    groups = [9, 4, 9, 1, 4, 7, 1, 7, 7]
    split = minibatches(groups, 2, seed="1-0-0")
    assert sorted(i for indices in split for i in indices) == list(range(9))
    members = [{groups[i] for i in indices} for indices in split]
    assert [len(m) for m in members] == [2, 2]
    assert not members[0] & members[1]
    assert all(indices == sorted(indices) for indices in split)
    assert minibatches(groups, 2, seed="1-0-0") == split
    assert len({str(minibatches(groups, 2, seed=str(s))) for s in range(20)}) > 2
    assert minibatches(groups, 1, seed="any") == [list(range(9))]


def test_groups_that_cannot_be_shared_out_are_an_error() -> None:
    with pytest.raises(ValueError, match="3 groups cannot be split into 2 mini-batches"):
        minibatches([0, 0, 1, 2], 2, seed="")
