"""Sums and differences of several numbers, worked from left to right: the task of the quickstart.

A problem is a prompt such as `47+35-36=`. A solution continues the chain of equalities; the last number counts:

    47+35-36=  46                 in the head
    47+35-36=  82-36=46           with its working

Both are right. A small model carries out one operation reliably but not three at once, so it is only as good as the
working that it shows. In the demonstrations for supervised fine-tuning all solutions are right, but most of those
that come last are given in the head. Reinforcement learning, which is told nothing but whether the last number is
right, has to find out that working pays.

Problems have three or four operands. A hash of its text decides whether a problem is held out. No held-out problem
occurs in the training data: neither as a problem nor as a step of another problem's solution. Problems of two
operands are what every solution is made of; they are in the demonstrations only.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

Split = Literal["train", "test"]
Operator = Literal["+", "-"]

LARGEST = 99
"""No operand, intermediate result or answer is larger; none is negative."""
HELD_OUT_SHARE = 0.1


@dataclass(frozen=True)
class Problem:
    """`numbers[0] operators[0] numbers[1] operators[1] ...`, to be evaluated from left to right."""

    numbers: tuple[int, ...]
    operators: tuple[Operator, ...]

    def __str__(self) -> str:
        rest = (f"{operator}{number}" for operator, number in zip(self.operators, self.numbers[1:], strict=True))
        return f"{self.numbers[0]}{''.join(rest)}"

    @property
    def answer(self) -> int:
        """The value of the whole."""
        return self.steps()[-1].numbers[0] if self.operators else self.numbers[0]

    def steps(self) -> list[Problem]:
        """What is left after each operation; the last one is the answer alone."""
        left: list[Problem] = []
        total = self.numbers[0]
        for i, operator in enumerate(self.operators, start=1):
            total += self.numbers[i] if operator == "+" else -self.numbers[i]
            left.append(Problem((total, *self.numbers[i + 1 :]), self.operators[i:]))
        return left

    def split(self) -> Split | None:
        """The side that the problem is on; None where a step of its solution is a problem of the other side."""
        held_out = {_is_held_out(step) for step in (self, *self.steps()) if len(step.numbers) > 2}
        if held_out == {True}:
            return "test"
        return "train" if True not in held_out else None

    def solution(self, *, working: bool) -> str:
        """The response: every step, or the answer alone."""
        return "=".join(str(step) for step in self.steps()) if working else str(self.answer)


def _is_held_out(problem: Problem) -> bool:
    digest = hashlib.blake2b(str(problem).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < HELD_OUT_SHARE * 2**64


def random_problem(rng: random.Random, n_operands: int) -> Problem:
    """A problem of `n_operands` positive numbers whose intermediate results and answer lie between 0 and `LARGEST`."""
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
    """Random problems of one side of the split, each number of operands equally often, without end.

    Raises:
        ValueError: problems of two operands are asked of the held-out side, which has none.
    """
    if split == "test" and min(n_operands) < 3:
        raise ValueError(f"n_operands={n_operands}: held-out problems have at least 3 operands")
    while True:
        n = rng.choice(n_operands)
        while (problem := random_problem(rng, n)).split() != split:
            pass
        yield problem


def rl_rows(split: Split, n_rows: int, seed: int = 1) -> Iterator[dict[str, Any]]:
    """Distinct problems with their answers, in the common schema of verifiable-reward data sets."""
    # A dict keeps the order and drops what was drawn twice.
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
    """Demonstrations (`prompt`, `response`), to be learned in this order.

    Args:
        n_worked: rows of the first part, two to four operands, all with their working: they teach to calculate.
        n_mixed: rows of the second part, three or four operands. They teach the habit of answering at once.
        working_share: probability that a row of the second part shows its working.
        split: the side of the split; held-out demonstrations measure the validation loss.
        seed: of the problems and of which ones show their working.
    """
    rng = random.Random(f"sft-{split}-{seed}")
    for problem in islice(problems(split, rng, (2, 3, 4)) if n_worked else (), n_worked):
        yield {"prompt": f"{problem}=", "response": problem.solution(working=True)}
    for problem in islice(problems(split, rng), n_mixed):
        yield {"prompt": f"{problem}=", "response": problem.solution(working=rng.random() < working_share)}


def write_arithmetic(
    out_dir: str | Path,
    *,
    n_train: int = 2048,
    n_test: int = 512,
    n_worked: int = 160_000,
    n_mixed: int = 40_000,
    working_share: float = 0.25,
    seed: int = 1,
) -> dict[str, Path]:
    """Write the four files of the task, as JSONL; the same arguments give the same bytes.

        train.jsonl, test.jsonl         problems with answers, for reinforcement learning and evaluation
        sft.jsonl, sft_test.jsonl       demonstrations; the second part's kind, of held-out problems, in the latter

    Returns:
        The path of each file by its stem. With the default arguments `train` and `test` are what ships as
        `package:arithmetic/train` and `package:arithmetic/test`.
    """
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    files: dict[str, Iterable[Mapping[str, Any]]] = {
        "train": rl_rows("train", n_train, seed),
        "test": rl_rows("test", n_test, seed),
        "sft": sft_rows(n_worked, n_mixed, working_share, "train", seed),
        "sft_test": sft_rows(0, n_test, working_share, "test", seed),
    }
    return {stem: _write_jsonl(out / f"{stem}.jsonl", rows) for stem, rows in files.items()}


def _write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in rows)
    return path
