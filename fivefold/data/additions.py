"""Additions as few-shot prompts: a task that a pretrained model of 100 million parameters can partly do.

    3 + 4 = 7
    9 + 5 = 14
    6 + 2 =            the model continues with " 8" and a new line, at which generation stops

A hash of its two numbers, in either order, decides whether a problem is held out. Only the test data ask held-out
problems, and the worked examples never show them: no training prompt shows the answer to a test question, whichever
seeds the two files were written with.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fivefold.config.paths import user_path

Split = Literal["train", "test"]
FileFormat = Literal["jsonl", "parquet"]

TASKS = {"one_digit": range(10), "two_digit": range(10, 100)}
"""The numbers that are added, by the name of the task."""

HELD_OUT_SHARE = 0.2
"""Share of all problems that are held out."""


@dataclass(frozen=True)
class Addition:
    """One sum of two numbers."""

    left: int
    right: int

    @property
    def answer(self) -> int:
        """The sum."""
        return self.left + self.right

    @property
    def question(self) -> str:
        """The text that the model continues."""
        return f"{self.left} + {self.right} ="

    @property
    def pair(self) -> frozenset[int]:
        """The two numbers without their order, which 3 + 4 and 4 + 3 have in common."""
        return frozenset((self.left, self.right))

    @property
    def split(self) -> Split:
        """The split that the problem belongs to, which is the same for both orders of its numbers."""
        text = f"{min(self.pair)}+{max(self.pair)}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return "test" if int.from_bytes(digest, "big") < HELD_OUT_SHARE * 2**64 else "train"


def additions(numbers: Iterable[int], split: Split) -> list[Addition]:
    """Return all problems over `numbers` that belong to `split`."""
    numbers = list(numbers)
    every = (Addition(left, right) for left in numbers for right in numbers)
    return [addition for addition in every if addition.split == split]


def few_shot_prompt(question: Addition, examples: Iterable[Addition]) -> str:
    """Return worked examples, one on each line, and then the question."""
    lines = [f"{example.question} {example.answer}\n" for example in examples]
    return "".join(lines) + question.question


def rows(task: str, split: Split, n_rows: int, *, n_shots: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield prompts with their answers, in the common schema of verifiable rewards.

    The questions come in random order, and none comes a second time before each has come once. The examples are drawn
    for each row from the training split, and are neither the question nor its mirror image.

    Args:
        task: a key of `TASKS`.
        split: split of the questions.
        n_rows: number of rows.
        n_shots: number of worked examples in each prompt.
        seed: seed of the order and of the examples.
    """
    rng = random.Random(f"{task}-{split}-{seed}")
    source = _in_turns(additions(TASKS[task], split), rng)
    worked = additions(TASKS[task], "train")
    for index, question in zip(range(n_rows), source, strict=False):
        # Two more than needed, because two of them may be the question and its mirror image.
        drawn = rng.sample(worked, n_shots + 2)
        examples = [example for example in drawn if example.pair != question.pair][:n_shots]
        yield {
            "data_source": f"additions/{task}",
            "prompt": few_shot_prompt(question, examples),
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(question.answer)},
            "extra_info": {"split": split, "index": index},
        }


def write_additions(
    out: str | Path,
    *,
    n_train: int = 1000,
    n_test: int = 100,
    n_shots: int = 2,
    seed: int = 1,
    file_format: FileFormat = "jsonl",
) -> list[Path]:
    """Write `<out>/<task>/train.<format>` and `test.<format>` for sums of one-digit and of two-digit numbers.

    Args:
        out: folder of the files, which are replaced if they exist.
        n_train: rows of each training file.
        n_test: rows of each test file.
        n_shots: number of worked examples in each prompt.
        seed: seed of the order and of the examples. Which problems are held out does not depend on it.
        file_format: `jsonl` or `parquet`.

    Returns:
        The paths of the files.

    Raises:
        ValueError: no rows, or more examples than there are problems to show.
    """
    if min(n_train, n_test) < 1:
        raise ValueError(f"n_train={n_train} and n_test={n_test} must be at least 1")
    most = min(len(additions(numbers, "train")) for numbers in TASKS.values()) - 2
    if not 0 <= n_shots <= most:
        raise ValueError(
            f"n_shots={n_shots} must be between 0 and {most}, the number of one-digit sums that can be shown"
        )
    sizes: dict[Split, int] = {"train": n_train, "test": n_test}
    files = []
    for task in TASKS:
        for split, n_rows in sizes.items():
            file = user_path(out) / task / f"{split}.{file_format}"
            _write(file, list(rows(task, split, n_rows, n_shots=n_shots, seed=seed)))
            files.append(file)
    return files


def _in_turns(problems: list[Addition], rng: random.Random) -> Iterator[Addition]:
    """Yield all problems in random order, again and again."""
    while True:
        yield from rng.sample(problems, len(problems))


def _write(file: Path, written: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in written), encoding="utf-8")
        return
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(written), file)
