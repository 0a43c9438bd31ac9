"""Episodes of several sequences on their way from a replica through the stream, a checkpoint, and mini-batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fivefold.environments.environment import Client, Task
from fivefold.environments.play import Player
from fivefold.roles import remote_batch
from fivefold.roles.remote_batch import RemoteBatch
from fivefold.types import Effort, Episode, Move, Prompt, Trajectory
from tests.unit.experience.local_replicas import LocalGroup, LocalWorker
from tests.unit.experience.streams import BATCH, SAMPLES, arithmetic, common, full_marks, recipe_of, saved

SPACER = 3
"""A token that the environment puts between two turns."""


class AsksAgain:
    """Asks a second time if the tokens of the first answer have an even sum, in a sequence with the first answer."""

    async def run(self, task: Task, client: Client) -> Episode:
        first = await client.complete(task.request.token_ids)
        turns = [Trajectory.single_turn(task.prompt, first)]
        if first.token_ids.sum() % 2 == 0:
            tokens = (*task.prompt.token_ids, *first.token_ids.tolist(), SPACER)
            second = await client.complete(tokens)
            turns.append(Trajectory.single_turn(Prompt(task.prompt.index, "", tokens, None), second))
        moves = [Move(2, 1, {"turns": 1.0}, "first")]
        return Episode(tuple(turns), "stop", {"turns": float(len(turns))}, moves=moves, effort=Effort(2, 0.5, 7, 3))


@pytest.mark.usefixtures("local_objects")
@pytest.mark.parametrize("age", [0, 1])
def test_groups_steps_and_checkpoints_count_episodes(age: int, tmp_path: Path) -> None:
    workers = [LocalWorker(max_batch_size=6) for _ in range(2)]
    for worker in workers:
        worker._player = Player(worker.engine, AsksAgain())
    group = LocalGroup(workers)
    group.each("set_version", 0)
    recipe = recipe_of(f"rollout.max_head_offpolicyness={age}")
    with common(recipe, group, full_marks, arithmetic(11)).source() as source:
        source.weights_sent(0)
        taken = source.take(1)
        waiting = dict(source._numbered()) if age else {}
        if age:
            source.stream.collect(list(waiting.values()))
    samples, batch = taken.samples, taken.batch
    assert len(samples) == len(batch) == BATCH * SAMPLES
    assert batch.cuts is not None
    n_turns = [len(row) for row in batch.cuts]
    assert set(n_turns) == {1, 2}, "both kinds of episodes occur"
    assert [sample.rewards["turns"] for sample in samples] == n_turns
    assert [sample.n_tokens for sample in samples] == [sum(row) for row in batch.cuts] == batch.lengths_N.tolist()
    assert [sample.n_sampled for sample in samples] == batch.trained_N.tolist()
    for row, sequence, sample in zip(batch.cuts, remote_batch.read_columns(batch, len(batch)), samples, strict=True):
        begins = np.cumsum((0, *row[:-1]))
        prompt = list(sample.prompt.token_ids)
        assert all(sequence["tokens"][start : start + len(prompt)].tolist() == prompt for start in begins)
        assert not sequence["mask"][begins].any(), "nothing predicts the first token of a sequence"
    chosen = batch.select([3, 0])
    assert chosen.cuts == (batch.cuts[3], batch.cuts[0])
    if not age:
        return
    for each in saved(waiting, tmp_path):
        group_ = waiting[each.place]
        assert each.fits(group_)
        answer = each.restored(group_.prompt)
        assert answer.batch.cuts == group_.batch.cuts
        assert [sample.rewards for sample in answer.samples] == [sample.rewards for sample in group_.samples]
        assert [sample.effort for sample in answer.samples] == [Effort(2, 0.5, 7, 3)] * len(answer.samples)
        assert [list(sample.moves) for sample in answer.samples] == [list(sample.moves) for sample in group_.samples]


def test_joined_batches_keep_the_cuts_of_the_rows_that_have_several_sequences() -> None:
    one, several = (
        RemoteBatch(np.array([3, 2]), np.array([1, 1]), ()),
        RemoteBatch(np.array([7]), np.array([2]), (), cuts=((3, 4),)),
    )
    assert RemoteBatch.joined([one, one]).cuts is None
    assert RemoteBatch.joined([one, several]).cuts == ((3,), (2,), (3, 4))
    assert RemoteBatch.joined([one, several]).sequence_lengths == [3, 2, 3, 4]
