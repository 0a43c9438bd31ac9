"""Sums and differences of several numbers, worked from left to right: the task of the quickstart.

A problem is a prompt such as `47+35-36=`. A solution continues the chain of equalities, and its last number counts:

    47+35-36=  46                 the answer alone
    47+35-36=  82-36=46           the answer with its working

Both are right. A small model can do one operation reliably, but not three at once, so it is only as good as the working
that it shows. In the demonstrations for supervised fine-tuning all solutions are right, but most of the last ones give
the answer alone. Reinforcement learning, whose reward depends only on the last number, has to find out that working
pays.

Problems have three or four operands. A hash of its text decides whether a problem is held out. No held-out problem
occurs in the training data, neither as a problem nor as a step of another problem's solution. Problems of two operands,
the steps of every solution, occur only in the demonstrations.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from fivefold.config.paths import user_path

Split = Literal["train", "test"]
Operator = Literal["+", "-"]

LARGEST = 99
"""Largest operand, intermediate result or answer; none is negative."""
HELD_OUT_SHARE = 0.1
"""Share of all problems that are held out."""


@dataclass(frozen=True)
class Problem:
    """The expression `numbers[0] operators[0] numbers[1] operators[1] ...`, which is evaluated from left to right."""

    numbers: tuple[int, ...]
    operators: tuple[Operator, ...]

    def __str__(self) -> str:
        rest = (f"{operator}{number}" for operator, number in zip(self.operators, self.numbers[1:], strict=True))
        return f"{self.numbers[0]}{''.join(rest)}"

    @property
    def answer(self) -> int:
        """The value of the expression."""
        return self.steps()[-1].numbers[0] if self.operators else self.numbers[0]

    def steps(self) -> list[Problem]:
        """Return the expression that is left after each operation; the last one is the answer alone."""
        left: list[Problem] = []
        total = self.numbers[0]
        for i, operator in enumerate(self.operators, start=1):
            total += self.numbers[i] if operator == "+" else -self.numbers[i]
            left.append(Problem((total, *self.numbers[i + 1 :]), self.operators[i:]))
        return left

    def split(self) -> Split | None:
        """Return the split of the problem; None if a step of its solution is a problem of the other split."""
        held_out = {_is_held_out(step) for step in (self, *self.steps()) if len(step.numbers) > 2}
        if held_out == {True}:
            return "test"
        return "train" if True not in held_out else None

    def solution(self, *, working: bool) -> str:
        """Return the response: every step, or the answer alone."""
        return "=".join(str(step) for step in self.steps()) if working else str(self.answer)


def _is_held_out(problem: Problem) -> bool:
    digest = hashlib.blake2b(str(problem).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < HELD_OUT_SHARE * 2**64


def random_problem(rng: random.Random, n_operands: int) -> Problem:
    """Draw a problem of `n_operands` positive numbers, whose results all lie between 0 and `LARGEST`."""
    total = rng.randint(1, LARGEST - 1)
    numbers, operators = [total], list[Operator]()
    for _ in range(n_operands - 1):
        operator: Operator = "+" if total == 0 or (total < LARGEST and rng.random() < 0.5) else "-"
        number = rng.randint(1, LARGEST - total if operator == "+" else total)
        numbers.append(number)
        operators.append(operator)
        total += number if operator == "+" else -number
    return Problem(tuple(numbers), tuple(operators))


def problems(split: Split, rng: random.Random, n_operands: tuple[int, ...] = (3, 4)) -> Iterator[Problem]:
    """Yield random problems of one split without end, each number of operands equally often.

    Raises:
        ValueError: held-out problems of two operands, which do not exist.
    """
    if split == "test" and min(n_operands) < 3:
        raise ValueError(f"n_operands={n_operands}: held-out problems have at least 3 operands")
    while True:
        n = rng.choice(n_operands)
        while (problem := random_problem(rng, n)).split() != split:
            pass
        yield problem


def rl_rows(split: Split, n_rows: int, seed: int = 1) -> Iterator[dict[str, Any]]:
    """Yield distinct problems with their answers, in the common schema of verifiable rewards."""
    # A dict keeps the order, and drops problems that are drawn twice.
    distinct: dict[Problem, None] = {}
    source = problems(split, random.Random(f"{split}-{seed}"))
    while len(distinct) < n_rows:
        distinct.setdefault(next(source))
    for index, problem in enumerate(distinct):
        yield {
            "data_source": "arithmetic",
            "prompt": f"{problem}=",
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(problem.answer)},
            "extra_info": {"split": split, "index": index, "n_operands": len(problem.numbers)},
        }


def sft_rows(
    n_worked: int, n_mixed: int, working_share: float, split: Split = "train", seed: int = 1
) -> Iterator[dict[str, str]]:
    """Yield demonstrations (`prompt`, `response`), which are to be learned in this order.

    Args:
        n_worked: rows of the first part: two to four operands, all with their working. They teach to calculate.
        n_mixed: rows of the second part: three or four operands. They teach the habit of giving the answer alone.
        working_share: probability that a row of the second part shows its working.
        split: split of the problems; held-out demonstrations are for the validation loss.
        seed: seed of the problems, and of the choice which ones show their working.
    """
    rng = random.Random(f"sft-{split}-{seed}")
    for problem in islice(problems(split, rng, (2, 3, 4)) if n_worked else (), n_worked):
        yield {"prompt": f"{problem}=", "response": problem.solution(working=True)}
    for problem in islice(problems(split, rng), n_mixed):
        yield {"prompt": f"{problem}=", "response": problem.solution(working=rng.random() < working_share)}


def pair_rows(split: Split, n_rows: int, seed: int = 1) -> Iterator[dict[str, str]]:
    """Yield pairs of answers to distinct problems (`prompt`, `chosen`, `rejected`). The chosen one is right.

    Half of the pairs have their working and half have not: only the numbers tell the two answers apart.
    """
    rng = random.Random(f"pairs-{split}-{seed}")
    distinct: dict[Problem, None] = {}
    source = problems(split, rng)
    while len(distinct) < n_rows:
        distinct.setdefault(next(source))
    for problem in distinct:
        working = rng.random() < 0.5
        chosen = problem.solution(working=working)
        yield {"prompt": f"{problem}=", "chosen": chosen, "rejected": _wrong(problem, split, rng, working=working)}


def _wrong(problem: Problem, split: Split, rng: random.Random, *, working: bool) -> str:
    """Return a response with one wrong operation, after which all others are right and no number leaves the range."""
    steps = problem.steps()
    mistakes: list[tuple[int, list[Problem]]] = []
    for at, right in enumerate(steps):
        wrong = [replace(right, numbers=(number, *right.numbers[1:])) for number in range(LARGEST + 1)]
        if left := [rest for rest in wrong if rest != right and _is_plausible(rest, split)]:
            mistakes.append((at, left))
    at, left = rng.choice(mistakes)
    rest = rng.choice(left)
    chain = [*steps[:at], rest, *rest.steps()]
    return "=".join(map(str, chain)) if working else str(chain[-1])


def _is_plausible(problem: Problem, split: Split) -> bool:
    """Return whether all numbers are in the range, and no step is a problem of the other split."""
    in_range = all(0 <= step.numbers[0] <= LARGEST for step in problem.steps())
    return in_range and (len(problem.numbers) < 3 or problem.split() == split)


def write_arithmetic(
    out_dir: str | Path,
    *,
    n_train: int = 2048,
    n_test: int = 512,
    n_pairs: int = 4096,
    n_worked: int = 160_000,
    n_mixed: int = 40_000,
    working_share: float = 0.25,
    seed: int = 1,
) -> dict[str, Path]:
    """Write the six files of the task, as JSONL; the same arguments give the same bytes.

        train.jsonl, test.jsonl     problems with answers, for reinforcement learning and evaluation
        sft.jsonl                   demonstrations
        sft_test.jsonl              demonstrations of held-out problems, like the second part of sft.jsonl
        pairs_train.jsonl,          right answers, each with a wrong one, for training on preferences and its evaluation
        pairs_test.jsonl

    Returns:
        The path of each file by its stem. With the default arguments, all but `sft` and `sft_test` are the files that
        ship, as `package:arithmetic/train` and so on.
    """
    out = user_path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    files: dict[str, Iterable[Mapping[str, Any]]] = {
        "train": rl_rows("train", n_train, seed),
        "test": rl_rows("test", n_test, seed),
        "sft": sft_rows(n_worked, n_mixed, working_share, "train", seed),
        "sft_test": sft_rows(0, n_test, working_share, "test", seed),
        "pairs_train": pair_rows("train", n_pairs, seed),
        "pairs_test": pair_rows("test", n_test, seed),
    }
    return {stem: _write_jsonl(out / f"{stem}.jsonl", rows) for stem, rows in files.items()}


def _write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in rows)
    return path
