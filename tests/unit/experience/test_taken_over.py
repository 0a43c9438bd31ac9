"""Which samples of a checkpoint a run that goes on takes over."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fivefold.checkpoints.changes import Change
from fivefold.checkpoints.start import FromScratch, Resume
from fivefold.checkpoints.store import Checkpoint
from fivefold.config.schema.rollout import GenerationConfig
from fivefold.engine.state.dcp_files import finish
from fivefold.experience.waiting import SAMPLED_WITH, WaitingGroups, taken_over
from fivefold.rollout.protocol import Begun, GenerationRequest
from tests.unit.checkpoints.examples import run_state


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """One group was being answered."""
    begun = Begun(np.full(3, 5, np.int32), np.full(3, -1, np.float32), np.zeros(3, np.int32), None)
    owner = WaitingGroups(dict, lambda: {4: [GenerationRequest((1, 2), 0, begun=begun)]})
    folder = tmp_path / "experience"
    folder.mkdir()
    owner.snapshot(folder)
    finish(folder, owner.write_snapshot())
    return Checkpoint(3, tmp_path)


def resumed(checkpoint: Checkpoint, *changes: Change) -> Resume:
    return Resume(checkpoint, run_state(3), changes, in_place=True)


@pytest.mark.parametrize("key", SAMPLED_WITH)
def test_samples_of_another_distribution_are_answered_anew_and_the_user_is_told(
    checkpoint: Checkpoint, key: str
) -> None:
    saved, note = taken_over(resumed(checkpoint, Change("actor.optimizer.lr", 1e-6, 2e-6), Change(key, 0.25, 0.5)))
    assert not saved.groups
    assert not saved.begun
    assert note is not None
    assert f"1 groups of samples of the checkpoint were sampled in another way ({key}: 0.25 -> 0.5)" in note


def test_samples_of_the_same_distribution_are_taken_over(checkpoint: Checkpoint) -> None:
    for change in (Change("gconfig.max_new_tokens", 8, 4), Change("evaluator.temperature", 1.0, 0.5)):
        saved, note = taken_over(resumed(checkpoint, change))
        assert [group.place for group in saved.begun] == [4]
        assert note is None


def test_a_run_without_a_checkpoint_of_samples_takes_nothing_over(tmp_path: Path) -> None:
    for start in (FromScratch("first"), resumed(Checkpoint(3, tmp_path), Change("gconfig.top_p", 1.0, 0.5))):
        saved, note = taken_over(start)
        assert (list(saved.groups), list(saved.begun), note) == ([], [], None)


def test_every_key_of_the_sampling_is_either_named_or_looked_at_group_by_group() -> None:
    named = {key.removeprefix("gconfig.") for key in SAMPLED_WITH}
    assert named | {"n_samples", "max_new_tokens"} == set(GenerationConfig.model_fields)
