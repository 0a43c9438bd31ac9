"""The admission rule of a stream, on a simulated clock: ages, order, and an end, whatever happens."""

from __future__ import annotations

import heapq
import random
from collections.abc import Collection
from dataclasses import dataclass, field

import pytest

from fivefold.data.turns import Turns


@dataclass
class Simulated:
    """What a simulated run did."""

    begun: dict[int, int] = field(default_factory=dict)
    """Version at which each prompt began, the last time."""
    trained: list[int] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)
    """Versions between the first token and the training of each trained prompt."""
    most_running: int = 0
    seconds: float = 0.0


def seconds_of(rng: random.Random) -> float:
    """Return how long a prompt's completions take; some take far longer than most."""
    return rng.choice([rng.uniform(0.1, 1), rng.uniform(1, 3), rng.uniform(20, 60)])


def simulate(
    turns: Turns, n_turns: int, rng: random.Random, *, failures: float, train_s: float, finished: Collection[int] = ()
) -> Simulated:
    """Run a trainer and replicas of random speed: completions take random times, and some must begin again."""
    result = Simulated(begun=dict.fromkeys(finished, turns.version))
    turns.restore(finished)
    done = set(finished)
    now, turn = 0.0, turns.version
    ending: list[tuple[float, int, bool]] = []
    for _ in range(n_turns):
        while not done.issuperset(turns.prompts_of(turn)):
            while (prompt := turns.begin()) is not None:
                assert prompt not in finished
                result.begun[prompt] = turns.version
                heapq.heappush(ending, (now + seconds_of(rng), prompt, rng.random() < failures))
            result.most_running = max(result.most_running, turns.n_running)
            assert ending, "the trainer waits, and nothing runs that could end its wait"
            ended, prompt, is_lost = heapq.heappop(ending)
            now = max(now, ended)
            if is_lost:  # the replica that ran it has died, and another one runs it
                heapq.heappush(ending, (now + seconds_of(rng), prompt, False))
            else:
                turns.finish(prompt)
                done.add(prompt)
        turns.take(turn)
        result.trained += turns.prompts_of(turn)
        result.ages += [turn - result.begun[prompt] for prompt in turns.prompts_of(turn)]
        now += train_s
        turn += 1
        turns.version = turn
    result.seconds = now
    return result


@pytest.mark.parametrize("seed", range(40))
def test_every_prompt_is_trained_once_in_order_and_young_enough(seed: int) -> None:
    rng = random.Random(seed)
    batch, age, first, n_turns = rng.randint(1, 8), rng.randint(0, 5), rng.choice([0, 7]), 25
    most = rng.choice([None, rng.randint(1, 12)])
    turns = Turns(batch, age, first_turn=first, last_turn=first + n_turns - 1, max_running=most)
    # A checkpoint may have prompts of any turn that was young enough.
    finished = rng.sample(range(first * batch, (first + age + 1) * batch), rng.randint(0, batch))
    failures, train_s = rng.choice([0.0, 0.3]), rng.choice([0.1, 10.0])
    result = simulate(turns, n_turns, rng, failures=failures, train_s=train_s, finished=finished)
    assert result.trained == list(range(first * batch, (first + n_turns) * batch))
    assert result.begun.keys() == set(result.trained), "nothing runs that is not trained"
    assert min(result.ages) >= 0
    assert max(result.ages) <= age
    assert most is None or result.most_running <= most


def test_with_age_zero_a_prompt_begins_with_the_weights_that_are_trained_on_it() -> None:
    turns = Turns(3, 0, first_turn=0, last_turn=9)
    result = simulate(turns, 10, random.Random(1), failures=0.2, train_s=1.0)
    assert set(result.ages) == {0}


def test_a_look_ahead_hides_the_longest_completions() -> None:
    seconds = [
        simulate(
            Turns(8, age, first_turn=0, last_turn=39), 40, random.Random(3), failures=0.0, train_s=10.0
        ).seconds
        for age in (0, 1, 4)
    ]  # fmt: skip
    assert seconds[0] > 1.4 * seconds[1] > 1.4 * seconds[2]


def test_prompts_begin_in_their_order_as_versions_grow() -> None:
    turns = Turns(2, 1, first_turn=0, last_turn=2)
    assert [turns.begin() for _ in range(5)] == [0, 1, 2, 3, None]
    turns.version = 1
    assert [turns.begin() for _ in range(3)] == [4, 5, None]
    turns.version = 2
    assert turns.begin() is None, "prompts behind the last step are not answered"
