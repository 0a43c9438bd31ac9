"""Sums and differences of several numbers, worked from left to right: the task of the quickstart.

A problem is a prompt such as `47+85-36=`. A solution is a chain of equalities that ends in the answer:

    47+85-36=  96                 everything in the head
    47+85-36=  132-36=96          the first operation written out

Both are right. A small model can carry out one operation at a time reliably, but not three at once, so it is only
as good as the working that it shows. The demonstrations for supervised fine-tuning write each intermediate step
with a small probability; reinforcement learning, which is told nothing but whether the last number is right, has
to find out that writing them pays.

The problems have three or four operands. A hash of its text decides whether a problem is held out. No held-out
problem occurs in the training data: not as a problem, and not as an intermediate step of another problem's solution.
Sums of two operands are the building blocks of every solution; they occur in the demonstrations only.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Split = Literal["train", "test"]
Operator = Literal["+", "-"]

LARGEST = 99
HELD_OUT_SHARE = 0.1
DRILL_SHARE = 0.2
"""Share of the demonstrations that have two operands, hence a single operation."""


@dataclass(frozen=True)
class Problem:
    """`numbers[0] operators[0] numbers[1] operators[1] ...`, evaluated from left to right, never below zero."""

    numbers: tuple[int, ...]
    operators: tuple[Operator, ...]

    def __str__(self) -> str:
        rest = (f"{operator}{number}" for operator, number in zip(self.operators, self.numbers[1:], strict=True))
        return f"{self.numbers[0]}{''.join(rest)}"

    @property
    def answer(self) -> int:
        return self.steps()[-1].numbers[0]

    def reduce(self) -> Problem:
        """The problem that is left after the first operation."""
        first, second, *rest = self.numbers
        result = first + second if self.operators[0] == "+" else first - second
        return Problem((result, *rest), self.operators[1:])

    def steps(self) -> list[Problem]:
        """What is left after each operation; the last one is the answer alone."""
        steps = [self]
        while steps[-1].operators:
            steps.append(steps[-1].reduce())
        return steps[1:]

    def split(self) -> Split | None:
        """The side that the problem is on; None if its solution would give away a problem of the other side."""
        held_out = {_held_out(step) for step in (self, *self.steps()) if len(step.numbers) > 2}
        if len(held_out) != 1:
            return None
        return "test" if held_out.pop() else "train"


def _held_out(problem: Problem) -> bool:
    digest = hashlib.blake2b(str(problem).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < HELD_OUT_SHARE * 2**64


def random_problem(rng: random.Random, n_operands: int) -> Problem:
    """A problem of `n_operands` positive numbers whose intermediate results and answer lie between 0 and 99."""
    total = rng.randint(1, LARGEST - 1)
    numbers, operators = [total], list[Operator]()
    for _ in range(n_operands - 1):
        operator: Operator = "+" if total == 0 or (total < LARGEST and rng.random() < 0.5) else "-"
        number = rng.randint(1, LARGEST - total if operator == "+" else total)
        numbers.append(number)
        operators.append(operator)
        total += number if operator == "+" else -number
    return Problem(tuple(numbers), tuple(operators))


def problems(split: Split, seed: int) -> Iterator[Problem]:
    """Distinct problems of three or four operands on one side of the split, without end."""
    rng = random.Random(f"{split}-{seed}")
    seen: set[Problem] = set()
    while True:
        n_operands = rng.choice((3, 4))
        while (problem := random_problem(rng, n_operands)) in seen or problem.split() != split:
            pass
        seen.add(problem)
        yield problem


def demonstration(problem: Problem, rng: random.Random, show_step: float) -> str:
    """A right solution in which each intermediate step is written with probability `show_step`."""
    *intermediate, answer = problem.steps()
    shown = [step for step in intermediate if rng.random() < show_step]
    return "=".join(str(step) for step in (*shown, answer))


def rl_row(problem: Problem, index: int, split: Split) -> dict[str, Any]:
    """A row in the schema of verl: the reward function gets `ground_truth` and `extra_info`."""
    return {
        "data_source": "arithmetic",
        "prompt": f"{problem}=",
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(problem.answer)},
        "extra_info": {"split": split, "index": index, "n_operands": len(problem.numbers)},
    }


def rl_rows(split: Split, n_rows: int, seed: int = 1) -> Iterator[dict[str, Any]]:
    """Distinct problems with their answers, for reinforcement learning or evaluation."""
    for index, problem in zip(range(n_rows), problems(split, seed), strict=False):
        yield rl_row(problem, index, split)


def sft_rows(split: Split, n_drills: int, n_demonstrations: int, show_step: float, seed: int = 1) -> Iterator[dict[str, str]]:
    """`prompt` and `response`, easy things first: drills of one operation, then demonstrations of whole problems."""
    rng = random.Random(f"sft-{split}-{seed}")
    for _ in range(n_drills):
        drill = random_problem(rng, 2)
        yield {"prompt": f"{drill}=", "response": str(drill.answer)}
    for problem in itertools.islice(problems(split, seed + 1), n_demonstrations):
        yield {"prompt": f"{problem}=", "response": demonstration(problem, rng, show_step)}
