"""Routes of an agent's turns: every sequence of a tree has the experts of its own tokens, each in its place."""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from fivefold.batch import Columns
from fivefold.environments.agents.tree import Tree
from fivefold.types import ROUTES, UNKNOWN_EXPERT, Completion
from tests.unit.environments.test_game import TOKENIZER

LAYERS, EXPERTS = 3, 8


def experts(token_ids: Sequence[int]) -> list[list[int]]:
    """Return the two experts of the last of some tokens in each layer, which all tokens up to it decide."""
    chosen = []
    for layer in range(LAYERS):
        first = zlib.crc32(bytes([layer, *token_ids])) % EXPERTS
        chosen.append([first, (first + 1 + len(token_ids)) % EXPERTS])
    return chosen


def answered(asked: Sequence[int], sampled: Sequence[int]) -> Completion:
    """Return a completion with the routes of all tokens that a model was given: all but the last one."""
    tokens = [*asked, *sampled]
    routes = [experts(tokens[: end + 1]) for end in range(len(tokens) - 1)]
    unknown = [[UNKNOWN_EXPERT] * 2] * LAYERS
    return Completion(
        np.array(sampled, np.int32),
        np.full(len(sampled), -1.0, np.float32),
        np.zeros(len(sampled), np.int32),
        "stop",
        np.array([*routes, unknown], np.int8),
    )


@pytest.mark.parametrize("seed", range(40))
def test_sequences_of_a_tree_have_each_route_in_its_place(seed: int) -> None:
    """Turns continue the prompt, the last turn or any other one, sometimes without a token in between."""
    numbers = random.Random(seed)
    prompt = [numbers.randrange(12) for _ in range(numbers.randint(1, 4))]
    tree = Tree(TOKENIZER, TOKENIZER.decode(prompt), prompt)
    sampled: list[tuple[int, ...]] = []
    """All tokens up to the end of each turn."""
    n_trained = 0
    for number in range(numbers.randint(1, 7)):
        before = numbers.choice([prompt, *sampled, *sampled[-1:] * 3])
        # Of its own number, so that no two requests are the same one.
        asked = [*before, *[12 + number] * numbers.randint(not sampled, 3), *[number] * (before == prompt)]
        new = [numbers.randrange(12) for _ in range(numbers.randint(1, 3))]
        tree.add(tree.continued_ids(asked), answered(asked, new))
        sampled.append((*asked, *new))
        n_trained += len(new)
    episode = tree.episode("done", [{}] * len(tree.turns))

    leaves = {ids for ids in sampled if not any(other[: len(ids)] == ids and other != ids for other in sampled)}
    assert Counter(tuple(t.tokens_T.tolist()) for t in episode.trajectories) == Counter(leaves)
    assert sum(int(t.mask_T.sum()) for t in episode.trajectories) == n_trained, "each turn is trained once"
    for trajectory in episode.trajectories:
        tokens = trajectory.tokens_T.tolist()
        assert trajectory.routes_TLK is not None
        assert trajectory.routes_TLK[:-1].tolist() == [experts(tokens[: end + 1]) for end in range(len(tokens) - 1)]
        assert (trajectory.routes_TLK[-1] == UNKNOWN_EXPERT).all(), "no model was given the last token"
    n_known = int((Columns.of([episode]).values[ROUTES][:, 0, 0] != UNKNOWN_EXPERT).sum())
    assert n_known == episode.n_tokens - len(leaves)
