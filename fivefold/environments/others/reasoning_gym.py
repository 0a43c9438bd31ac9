"""reasoning-gym: its problems as rows of a data set, and the reward by which each of its data sets scores answers.

{"prompt": [{"role": "user", "content": "..."}], "reward_model": {"ground_truth": "184", ...},
 "extra_info": {"dataset": "leg_counting", "options": "{\\"max_animals\\": 5}", "problem": "{...}", ...}, ...}
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from fivefold.environments.others.package import imported

reasoning_gym = imported("reasoning_gym", "reasoning-gym")

INSTRUCTION = "Write the final answer between <answer> and </answer>."
BOX = r"\boxed{"
_UNREADABLE = (ArithmeticError, AttributeError, LookupError, SyntaxError, TypeError, ValueError)
"""What some data sets raise for an answer of another form than theirs."""


def rows(dataset: str, n: int, *, seed: int, **options: Any) -> Iterator[dict[str, Any]]:
    """Yield problems as rows in verl's schema.

    Args:
        dataset: a data set of reasoning-gym.
        n: number of rows.
        seed: seed of the first row; each next row has the next seed, so that training and test data need seeds that are
            further apart than either has rows.
        options: fields of the data set's configuration, such as its difficulty.

    Raises:
        ValueError: there is no such data set, or it scores by what JSON cannot keep.
    """
    made = json.dumps(options, sort_keys=True)
    of = reasoning_gym.create_dataset(dataset, seed=seed, **options)
    for index in range(n):
        problem = of[index]
        text, answer = json.dumps(problem), problem["answer"]
        if of.score_answer(answer, problem) != of.score_answer(answer, json.loads(text)):
            raise ValueError(f"reasoning-gym's {dataset} scores by tuples, which JSON does not keep: take another")
        yield {
            "data_source": f"reasoning-gym/{dataset}",
            "prompt": [{"role": "user", "content": f"{problem['question'].rstrip()}\n\n{INSTRUCTION}"}],
            "ability": "reasoning",
            # Where many answers are right, some data sets name none.
            "reward_model": {"style": "rule", "ground_truth": answer or ""},
            "extra_info": {"dataset": dataset, "options": made, "problem": text, "index": index},
        }


def read(path: str, split: str | None, n: int, seed: int, **options: Any) -> Iterator[dict[str, Any]]:
    """Yield problems without a word of how to answer, as a recipe's `reader`.

    Args:
        path: a data set of reasoning-gym.
        split: not read.
        n: see `rows`.
        seed: see `rows`.
        options: see `rows`.

    Raises:
        ValueError: see `rows`.
    """
    for row in rows(path, n, seed=seed, **options):
        [message] = row["prompt"]
        yield {**row, "prompt": message["content"].removesuffix(INSTRUCTION).rstrip()}


def score(
    response: str, ground_truth: str, *, data_source: str, extra_info: Mapping[str, Any], boxed: bool = False
) -> float:
    """Return the data set's score of the last answer in a response, and 0 if it has none.

    Args:
        response: the completion.
        ground_truth: not read.
        data_source: not read.
        extra_info: as `rows` writes it.
        boxed: whether the answer is in a box, and not between tags.
    """
    answer = last_box(response) if boxed else reasoning_gym.utils.extract_answer(response)
    if answer is None:
        return 0.0
    of = _dataset(extra_info["dataset"], extra_info["options"])
    try:
        return float(of.score_answer(answer, json.loads(extra_info["problem"])))
    except _UNREADABLE:
        return 0.0


def last_box(text: str) -> str | None:
    """Return what the last box holds, braces in pairs included; None if there is none, or it does not end."""
    _, box, rest = text.rpartition(BOX)
    depth = 1
    for place, character in enumerate(rest if box else ""):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[:place]
    return None


@lru_cache(maxsize=256)
def _dataset(dataset: str, options: str) -> Any:
    return reasoning_gym.create_dataset(dataset, **json.loads(options))
