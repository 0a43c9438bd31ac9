"""The task of additions: answers are right, and no training data show the answer of a held-out problem."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from fivefold.config.schema.data import DatasetConfig
from fivefold.data.additions import TASKS, Addition, additions, rows, write_additions
from fivefold.data.rows import load_rows

LINE = re.compile(r"(\d+) \+ (\d+) =(?: (\d+))?")


def parse(row: dict[str, Any]) -> tuple[list[tuple[int, int]], tuple[int, int]]:
    """Check every answer; return the numbers of the examples and those of the question."""
    *examples, question = [LINE.fullmatch(line).groups() for line in row["prompt"].split("\n")]  # type: ignore[union-attr]
    assert all(int(left) + int(right) == int(answer) for left, right, answer in examples)
    left, right, answer = question
    assert answer is None
    assert row["reward_model"]["ground_truth"] == str(int(left) + int(right))
    return [(int(a), int(b)) for a, b, _ in examples], (int(left), int(right))


@pytest.mark.parametrize("task", TASKS)
def test_every_problem_is_in_one_split_with_its_mirror_image(task: str) -> None:
    sides = [additions(TASKS[task], split) for split in ("train", "test")]
    pairs = [(addition.left, addition.right) for side in sides for addition in side]
    assert sorted(pairs) == list(product(TASKS[task], repeat=2))
    assert not {a.pair for a in sides[0]} & {a.pair for a in sides[1]}
    assert 0.15 < len(sides[1]) / len(pairs) < 0.25


@pytest.mark.parametrize("task", TASKS)
def test_no_held_out_answer_is_ever_shown(task: str) -> None:
    held_out = {addition.pair for addition in additions(TASKS[task], "test")}
    for seed in (1, 2):
        for row in rows(task, "train", 300, n_shots=3, seed=seed):
            examples, question = parse(row)
            assert not {frozenset(pair) for pair in (*examples, question)} & held_out
        for row in rows(task, "test", 100, n_shots=3, seed=seed):
            examples, question = parse(row)
            assert frozenset(question) in held_out
            assert not {frozenset(pair) for pair in examples} & held_out


def test_examples_differ_from_each_other_and_from_the_question() -> None:
    for row in rows("one_digit", "train", 300, n_shots=20, seed=1):
        examples, question = parse(row)
        assert len(set(examples)) == 20
        assert frozenset(question) not in map(frozenset, examples)


def test_no_question_comes_again_before_every_other_has_come() -> None:
    n = len(additions(TASKS["one_digit"], "test"))
    questions = [parse(row)[1] for row in rows("one_digit", "test", 3 * n, n_shots=1, seed=5)]
    assert all(questions.count(question) == 3 for question in set(questions))
    assert len(set(questions[:n])) == n


def test_a_row_has_the_common_schema() -> None:
    (row,) = rows("two_digit", "test", 1, n_shots=0, seed=1)
    question = row["prompt"]
    left, right = parse(row)[1]
    assert row == {
        "data_source": "additions/two_digit",
        "prompt": question,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(left + right)},
        "extra_info": {"split": "test", "index": 0},
    }


@pytest.mark.parametrize("file_format", ["jsonl", "parquet"])
def test_files_hold_the_rows_and_depend_on_the_seed_alone(file_format: Any, tmp_path: Path) -> None:
    sizes = {"n_train": 30, "n_test": 10, "n_shots": 2, "file_format": file_format}
    files = write_additions(tmp_path / "a", seed=3, **sizes)
    assert [str(file.relative_to(tmp_path / "a")) for file in files] == [
        f"{task}/{split}.{file_format}" for task in TASKS for split in ("train", "test")
    ]
    for file, (task, (split, n)) in zip(files, product(TASKS, (("train", 30), ("test", 10))), strict=True):
        assert load_rows(DatasetConfig(path=str(file))) == list(rows(task, split, n, n_shots=2, seed=3))
    again, other = write_additions(tmp_path / "b", seed=3, **sizes), write_additions(tmp_path / "c", seed=4, **sizes)
    assert [file.read_bytes() for file in again] == [file.read_bytes() for file in files]
    assert all(mine.read_bytes() != theirs.read_bytes() for mine, theirs in zip(other, files, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"n_shots": 81}, "n_shots=81"), ({"n_test": 0}, "n_test=0")],
)
def test_sizes_that_are_not_possible_are_refused(options: dict[str, int], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        write_additions(tmp_path, **options)  # type: ignore[arg-type]


def test_the_split_depends_on_the_numbers_alone() -> None:
    assert {Addition(3, 8).split, Addition(8, 3).split} == {"test"}
    assert {Addition(3, 4).split, Addition(4, 3).split} == {"train"}
