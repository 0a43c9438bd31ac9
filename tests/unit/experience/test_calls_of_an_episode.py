"""All calls of an episode go to one replica, whose cache of prefixes has its tokens; episodes spread over all."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from fivefold.environments.environment import Client, Task
from fivefold.environments.play import Player
from fivefold.environments.transcript import Transcript
from fivefold.types import Episode
from tests.unit.experience.local_replicas import LocalGroup, LocalWorker
from tests.unit.experience.streams import BATCH, SAMPLES, arithmetic, common, full_marks, recipe_of

N_TURNS = 3


class Turns:
    """Asks for `N_TURNS` short completions, each of which continues the tokens before."""

    async def run(self, task: Task, client: Client) -> Episode:
        transcript = Transcript(task.prompt.token_ids)
        for _ in range(N_TURNS):
            transcript.sampled(await client.complete(transcript.token_ids))
            transcript.given([5])
        return Episode((transcript.trajectory(),), "done", {"f": 1.0}, N_TURNS)


@pytest.mark.usefixtures("local_objects")
@pytest.mark.parametrize("age", [0, 1])
def test_the_calls_of_an_episode_go_to_one_replica(age: int) -> None:
    asked: dict[tuple[int, ...], set[int]] = defaultdict(set)
    """Replicas that computed the tokens of an episode's prompt, with which its calls begin."""
    lengths: list[list[int]] = [[], []]
    workers = [LocalWorker(max_batch_size=6) for _ in range(2)]
    for rank, worker in enumerate(workers):
        engine, submit = worker.engine, worker.engine.submit

        def noting(number: int, request: Any, sampling: Any, rank: int = rank, submit: Any = submit) -> None:
            for before in [tokens for tokens in list(asked) if request.token_ids[: len(tokens)] == tokens]:
                asked[before].add(rank)
            asked[request.token_ids].add(rank)
            lengths[rank].append(len(request.token_ids))
            submit(number, request, sampling)

        engine.submit = noting  # type: ignore[method-assign]
        worker._player = Player(engine, Turns())
    group = LocalGroup(workers)
    group.each("set_version", 0)
    recipe = recipe_of(f"rollout.max_head_offpolicyness={age}", "gconfig.max_new_tokens=4")
    with common(recipe, group, full_marks, arithmetic(11)).source() as source:
        source.weights_sent(0)
        taken = source.take(1)
    assert len(taken.samples) == BATCH * SAMPLES
    assert all(sample.n_turns == N_TURNS for sample in taken.samples)
    first = min(map(len, asked))
    continued = {tokens: ranks for tokens, ranks in asked.items() if len(tokens) > first}
    assert len(continued) > BATCH * SAMPLES
    assert all(len(ranks) == 1 for ranks in continued.values())
    assert all(lengths), "both replicas play"
