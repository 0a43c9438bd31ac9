"""Episodes of several turns, many at a time, on an engine that answers, is slow, dies, and comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from fivefold.environments.environment import Client, Environment, Task
from fivefold.environments.play import Player
from fivefold.environments.single_turn import SingleTurn
from fivefold.rollout.protocol import Begun, GenerationRequest, SamplingParams
from fivefold.types import Completion, Episode, Prompt, Trajectory

SAMPLING = SamplingParams(16, 0, False, 1.0, 1.0, 0, (), ())


@dataclass
class Scripted:
    """An engine that answers its oldest request at each call, with the request's last token plus 1."""

    has_weights: bool = True
    seen: list[GenerationRequest] = field(default_factory=list)
    running: dict[int, GenerationRequest] = field(default_factory=dict)
    lost: dict[int, GenerationRequest] = field(default_factory=dict)
    dies: bool = False

    @property
    def n_running(self) -> int:
        return len(self.running)

    def submit(self, number: int, request: GenerationRequest, sampling: SamplingParams) -> None:
        self.seen.append(request)
        self.running[number] = request

    def collect(self, seconds: float) -> list[tuple[int, Completion]]:
        if self.dies:
            self.lost, self.running, self.dies = self.running, {}, False
            return []
        number = min(self.running)
        last = self.running.pop(number).token_ids[-1]
        return [(number, Completion.of([last + 1], [-1.0], "stop", 3))]

    def unfinished(self) -> dict[int, GenerationRequest]:
        begun = Begun(np.array([9], np.int32), np.array([-1.0], np.float32), np.array([3], np.int32), None)
        return {n: GenerationRequest(r.token_ids, r.seed, begun=begun) for n, r in self.running.items()}

    def take_lost(self) -> dict[int, GenerationRequest]:
        lost, self.lost = self.lost, {}
        return lost


@dataclass
class Turns:
    """Asks `n` times; each answer and a token 50 from a tool, which takes time, go to the end of the next prompt."""

    n: int
    tool: Callable[[], object] = lambda: asyncio.sleep(0.001)

    async def run(self, task: Task, client: Client) -> Episode:
        tokens, trajectories = task.prompt.token_ids, []
        for _ in range(self.n):
            completion = await client.complete(tokens)
            trajectories.append(Trajectory.single_turn(Prompt(task.prompt.index, "", tokens, None), completion))
            await self.tool()  # type: ignore[misc]
            tokens = (*tokens, *completion.token_ids.tolist(), 50)
        return Episode(tuple(trajectories), "stop", {"game": 0.5})


def task(index: int, seed: int = 0) -> Task:
    return Task(Prompt(index, "", (1, index), None), GenerationRequest((1, index), seed), SAMPLING)


def played(player: Player, calls: int = 2000) -> dict[int, list[Episode]]:
    done: dict[int, list[Episode]] = {}
    for _ in range(calls):
        done |= dict(player.advance(0.01))
        if not player.n_running:
            return done
    raise AssertionError("the episodes do not end")


def test_a_single_turn_is_the_prompt_and_its_completion() -> None:
    engine = Scripted()
    player = Player(engine, SingleTurn())
    player.begin(7, [task(20, seed=5), task(30, seed=6)])
    assert player.n_running == 2
    [first, second] = played(player)[7]
    assert [e.trajectories[0].tokens_T.tolist() for e in (first, second)] == [[1, 20, 21], [1, 30, 31]]
    assert [request.seed for request in engine.seen] == [5, 6], "the first request has the seed of the episode"


def test_jobs_of_several_turns_and_tools_end_each_by_itself() -> None:
    engine = Scripted()
    player = Player(engine, Turns(3))
    player.begin(0, [task(20), task(20, seed=1)])
    player.begin(1, [task(30, seed=2)])
    done = played(player)
    assert {number: len(episodes) for number, episodes in done.items()} == {0: 2, 1: 1}
    [episode] = done[1]
    assert [t.tokens_T.tolist() for t in episode.trajectories] == [
        [1, 30, 31],
        [1, 30, 31, 50, 51],
        [1, 30, 31, 50, 51, 50, 51],
    ]
    assert episode.rewards == {"game": 0.5}
    assert episode.n_tokens == 15
    seeds = [request.seed for request in engine.seen]
    assert len(set(seeds)) == len(seeds) == 9, "every request of every episode has its own random numbers"


def test_the_same_episodes_ask_the_same_in_every_run() -> None:
    runs = []
    for _ in range(2):
        engine = Scripted()
        player = Player(engine, Turns(2, tool=lambda: asyncio.sleep(0)))
        player.begin(0, [task(20, seed=seed) for seed in range(4)])
        played(player)
        runs.append([(request.token_ids, request.seed) for request in engine.seen])
    assert runs[0] == runs[1]


def test_a_slow_tool_holds_up_no_other_episode() -> None:
    gate = asyncio.Event()

    class OneWaits:
        async def run(self, task: Task, client: Client) -> Episode:
            completion = await client.complete(task.prompt.token_ids)
            if task.prompt.index == 20:
                await gate.wait()
            return Episode.single_turn(task.prompt, completion)

    player = Player(Scripted(), OneWaits())
    player.begin(0, [task(20)])
    player.begin(1, [task(30)])
    ended = [number for _ in range(20) for number, _ in player.advance(0.01)]
    assert ended == [1]
    assert player.n_running == 1
    assert 0.1 < player.waited_s < 1, "after the other one, nobody waited for the engine"
    gate.set()
    assert list(played(player)) == [0]


@pytest.mark.parametrize("environment", [SingleTurn(), Turns(2)])
def test_a_job_that_was_lost_goes_on_elsewhere_with_what_it_has(environment: Environment) -> None:
    engine = Scripted()
    player = Player(engine, environment)
    player.begin(4, [task(20, seed=1), task(30, seed=2)])
    player.advance(0.0)  # the first request is answered
    engine.dies = True
    assert player.advance(0.01) == []
    lost = player.unfinished()
    assert player.take_lost() == lost
    assert (player.take_lost(), player.unfinished(), player.n_running) == ({}, {}, 0)
    [first, second] = lost[4]
    assert first.begun is not None
    assert first.begun.token_ids.tolist() == [21]
    assert first.begun.finish_reason == "stop"
    assert (second.token_ids, second.seed, second.begun) == ((1, 30), 2, None)


def test_jobs_in_progress_are_told_with_their_tokens_so_far() -> None:
    player = Player(Scripted(), SingleTurn())
    player.begin(4, [task(20, seed=1), task(30, seed=2)])
    player.advance(0.0)
    [first, second] = player.unfinished()[4]
    assert first.begun is not None
    assert first.begun.finish_reason == "stop"
    assert second.begun is not None
    assert second.begun.token_ids.tolist() == [9]
    assert second.begun.finish_reason is None
    assert list(played(player)) == [4]


def test_requests_wait_for_an_engine_without_weights() -> None:
    engine = Scripted(has_weights=False)
    player = Player(engine, SingleTurn())
    player.begin(0, [task(20)])
    assert player.advance(0.0) == []
    assert not engine.seen
    engine.has_weights = True
    assert list(played(player)) == [0]


def test_what_an_environment_raises_ends_the_call() -> None:
    class Broken:
        async def run(self, task: Task, client: Client) -> Episode:
            raise ValueError("the board has no row 9")

    player = Player(Scripted(), Broken())
    player.begin(0, [task(20), task(30)])
    with pytest.raises(ValueError, match="no row 9"):
        player.advance(0.01)
