"""Episodes whose environment failed leave their group, on the way to a step, and in a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fivefold.environments.environment import Client, Task
from fivefold.environments.failing import Failing
from fivefold.environments.play import Player
from fivefold.environments.single_turn import SingleTurn
from fivefold.environments.user_code import EnvironmentFailed
from fivefold.experience.source import Experience
from fivefold.observe.errors import RunFailed
from fivefold.roles.remote_batch import read_columns
from fivefold.types import Episode
from tests.unit.experience.local_replicas import LocalGroup, LocalWorker
from tests.unit.experience.streams import BATCH, SAMPLES, arithmetic, common, full_marks, recipe_of, saved

GAME = ("environment.game=fivefold.environments.guess_digit:GuessDigit", "reward.fn=environment", "reward.kwargs={}")


@dataclass
class FailsFor:
    """One turn, whose environment fails after it for some tasks."""

    fails: Callable[[Task], bool]

    async def run(self, task: Task, client: Client) -> Episode:
        episode = await SingleTurn().run(task, client)
        if self.fails(task):
            raise EnvironmentFailed(f"prompt {task.prompt.index}: the board is away")
        return episode


def taken(
    fails: Callable[[Task], bool],
    *overrides: str,
    save_to: Path | None = None,
    also_on: dict[int, Callable[[Task], bool]] | None = None,
) -> tuple[Experience, Any]:
    """Return the first step's experience, and what the stream has to say of it; save the groups that wait.

    Args:
        fails: whether the environment of a task fails on every replica.
        overrides: keys of the recipe.
        save_to: where to save them.
        also_on: whether it fails on a replica, by its rank.
    """
    workers = [LocalWorker(max_batch_size=6) for _ in range(2)]
    for rank, worker in enumerate(workers):
        own = (also_on or {}).get(rank, fails)
        worker._player = Player(worker.engine, Failing(FailsFor(own)))
        worker.spec = recipe_of(*GAME)  # type: ignore[assignment]  # of which the worker reads `environment`
    group = LocalGroup(workers)
    group.each("set_version", 0)
    with common(recipe_of(*GAME, *overrides), group, full_marks, arithmetic(11)).source() as source:
        source.weights_sent(0)
        first = source.take(1)
        if save_to is not None:
            waiting = dict(source._numbered())
            source.stream.collect(list(waiting.values()))
            for each in saved(waiting, save_to):
                own = waiting[each.place]
                assert each.fits(own)
                assert each.oldest == 0 or not own.finished
                own.answers = [each.restored(own.prompt)]
                own.rewarded = [sample.rewarded({"f": 1.0}) for sample in own.samples if not sample.has_failed]
                assert len(own.failures) == len(own.requests) - len(own.finished)
                assert own.finished_batch.trained_N.tolist() == [sample.n_sampled for sample in own.finished]
        return first, source.stream.take_news()


def tokens_of(experience: Experience) -> list[tuple[int, list[int]]]:
    batch = experience.batch
    rows = [row["tokens"].tolist() for row in read_columns(batch, len(batch))]
    return list(zip(experience.groups, rows, strict=True))


@pytest.mark.usefixtures("local_objects")
@pytest.mark.parametrize("age", [0, 1])
def test_a_step_trains_the_episodes_that_have_not_failed(age: int, tmp_path: Path) -> None:
    whole, news = taken(lambda task: False, f"rollout.max_head_offpolicyness={age}")
    assert news is None
    assert whole.metrics["episode/failed"] == 0.0
    prompts = list(dict.fromkeys(whole.groups))
    seeds: set[tuple[int, int]] = set()

    def fails(task: Task) -> bool:
        """All episodes of one prompt fail, and one episode of another."""
        seeds.add((task.prompt.index, task.request.seed))
        first = min((seed for index, seed in seeds if index == prompts[1]), default=0)
        return task.prompt.index == prompts[0] or (task.prompt.index, task.request.seed) == (prompts[1], first)

    options = (f"rollout.max_head_offpolicyness={age}", "environment.max_failed=0.5")
    some, news = taken(fails, *options, save_to=tmp_path if age else None)
    n_failed = BATCH * SAMPLES - len(some.samples)
    assert set(some.groups) == set(prompts[1:])
    assert SAMPLES + 1 <= n_failed <= 2 * SAMPLES
    assert some.metrics["episode/failed"] == pytest.approx(n_failed / (BATCH * SAMPLES))
    left = tokens_of(whole)
    assert all(row in left for row in tokens_of(some)), "what has not failed is what it would be without failures"
    assert [sample.n_sampled for sample in some.samples] == some.batch.trained_N.tolist()
    assert all(sample.rewards == {"f": 1.0} for sample in some.samples)
    assert f"{n_failed} episodes failed" in news
    assert "the board is away" in news


@pytest.mark.usefixtures("local_objects")
@pytest.mark.parametrize("age", [0, 1])
@pytest.mark.parametrize("retries", [0, 1, 3])
def test_an_episode_that_fails_is_played_again_on_another_replica(age: int, retries: int) -> None:
    """Of the first replica's episodes every second one fails there; the other replica's none."""
    options = (f"rollout.max_head_offpolicyness={age}", f"environment.retries={retries}", "environment.max_failed=0.9")
    played: list[list[tuple[int, int]]] = [[], []]

    def broken(task: Task) -> bool:
        played[0].append((task.prompt.index, task.request.seed))
        return task.request.seed % 2 == 0

    def sound(task: Task) -> bool:
        played[1].append((task.prompt.index, task.request.seed))
        return False

    whole, _ = taken(lambda task: False, *options)
    some, news = taken(sound, *options, also_on={0: broken})
    # The stream may end while an episode of the second step waits to be played again.
    failed = [(prompt, seed) for prompt, seed in played[0] if seed % 2 == 0 and prompt in whole.groups]
    assert failed
    assert len(failed) == len(set(failed)), "none is played twice on the replica where it failed"
    if retries == 0:
        assert not set(failed) & set(played[1])
        assert "the board is away" in news
        return
    assert set(failed) <= set(played[1])
    assert news is None
    assert some.metrics["episode/failed"] == 0.0
    assert tokens_of(some) == tokens_of(whole), "the same episodes, at their places in the groups"


@pytest.mark.usefixtures("local_objects")
@pytest.mark.parametrize("retries", [0, 2])
def test_an_episode_is_played_again_as_often_as_asked(retries: int) -> None:
    times: Counter[tuple[int, int]] = Counter()

    def fails(task: Task) -> bool:
        times[task.prompt.index, task.request.seed] += 1
        return task.request.seed % 3 == 0

    _, news = taken(fails, f"environment.retries={retries}", "environment.max_failed=0.9")
    assert "the board is away" in news
    assert all(n == (1 + retries if seed % 3 == 0 else 1) for (_, seed), n in times.items())


@pytest.mark.usefixtures("local_objects")
def test_too_many_failures_end_the_run_with_the_first_error() -> None:
    with pytest.raises(RunFailed, match=r"(?s)\d of the 8 episodes .*environment\.max_failed=0\.1 .*the board is away"):
        taken(lambda task: True)
