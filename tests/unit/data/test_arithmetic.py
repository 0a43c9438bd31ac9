"""The arithmetic task: solutions are right, and no training data show a held-out problem."""

from __future__ import annotations

import itertools
import json
import random
import re
from importlib.resources import files
from pathlib import Path

import pytest

from fivefold.data.arithmetic import LARGEST, Problem, pair_rows, problems, rl_rows, sft_rows, write_arithmetic


def value(expression: str) -> int:
    """Return Python's value of the expression; Python evaluates from left to right too."""
    assert re.fullmatch(r"\d+([+-]\d+)*", expression)
    return int(eval(expression.replace("+", " + ").replace("-", " - ")))


def test_answers_are_what_python_calculates() -> None:
    for row in itertools.chain(rl_rows("train", 200), rl_rows("test", 50)):
        assert value(row["prompt"].removesuffix("=")) == int(row["reward_model"]["ground_truth"])


def test_every_link_of_a_worked_chain_has_the_same_value_and_one_operation_less() -> None:
    for row in sft_rows(300, 0, working_share=0.0):
        chain = (row["prompt"] + row["response"]).split("=")
        assert len({value(link) for link in chain}) == 1
        n_operations = [len(re.findall(r"[+-]", link)) for link in chain]
        assert n_operations == list(range(n_operations[0], -1, -1))


def test_no_number_leaves_the_range() -> None:
    for row in sft_rows(300, 0, working_share=0.0):
        assert all(0 <= int(number) <= LARGEST for number in re.findall(r"\d+", row["prompt"] + row["response"]))


def test_the_second_part_shows_its_working_as_often_as_asked() -> None:
    rows = list(sft_rows(0, 2000, working_share=0.25))
    assert all(value(row["prompt"].removesuffix("=")) == value(row["response"].split("=")[-1]) for row in rows)
    assert sum("=" in row["response"] for row in rows) / len(rows) == pytest.approx(0.25, abs=0.04)


def test_no_held_out_problem_occurs_in_training_data_not_even_as_a_step() -> None:
    """With random splits, about 90 of these held-out problems would be steps of these demonstrations."""
    held_out = {str(problem) for problem in itertools.islice(problems("test", random.Random(0), (3,)), 4000)}
    held_out |= {row["prompt"].removesuffix("=") for row in rl_rows("test", 500)}
    demonstrations = {
        part for row in sft_rows(4000, 4000, 0.5) for part in (row["prompt"] + row["response"]).split("=")
    }
    prompts = {row["prompt"].removesuffix("=") for row in rl_rows("train", 1000)}
    assert not held_out & (demonstrations | prompts)


def test_chosen_answers_are_right_and_rejected_ones_wrong_in_one_operation() -> None:
    for row in pair_rows("train", 300):
        chosen, rejected = (row["prompt"].split("=")[:1] + row[name].split("=") for name in ("chosen", "rejected"))
        assert len(chosen) == len(rejected), "both have their working, or neither has"
        assert len({value(part) for part in chosen}) == 1
        mistakes = [value(one) != value(next_one) for one, next_one in itertools.pairwise(rejected)]
        assert sum(mistakes) == 1
        assert all(0 <= int(number) <= LARGEST for part in rejected for number in re.findall(r"\d+", part))
        assert "=-" not in row["rejected"]


def test_pairs_keep_the_splits_apart() -> None:
    held_out = {row["prompt"].removesuffix("=") for row in pair_rows("test", 200)}
    trained = {
        part for row in pair_rows("train", 600) for name in row for part in row[name].removesuffix("=").split("=")
    }
    assert not held_out & trained


def test_a_problem_with_a_held_out_step_is_not_in_the_training_data() -> None:
    rng = random.Random(1)
    inner = next(problems("test", rng, (3,)))
    outer = [
        Problem((inner.numbers[0] - first, first, *inner.numbers[1:]), ("+", *inner.operators))
        for first in range(1, inner.numbers[0])
    ]
    assert outer
    assert "train" not in {problem.split() for problem in outer}


def test_problems_are_distinct_and_have_three_or_four_operands() -> None:
    rows = list(rl_rows("train", 500))
    assert len({row["prompt"] for row in rows}) == 500
    assert {row["extra_info"]["n_operands"] for row in rows} == {3, 4}


def test_held_out_problems_of_two_operands_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 3 operands"):
        next(problems("test", random.Random(0), (2, 3)))


@pytest.mark.long
def test_written_files_are_the_shipped_ones(tmp_path: Path) -> None:
    written = write_arithmetic(tmp_path, n_worked=5, n_mixed=5)
    for stem in ("train", "test", "pairs_train", "pairs_test"):
        shipped = files("fivefold.data") / "packaged" / "arithmetic" / f"{stem}.jsonl"
        assert written[stem].read_bytes() == shipped.read_bytes()
    assert len(written["sft"].read_text().splitlines()) == 10
    assert json.loads(written["sft_test"].read_text().splitlines()[0]).keys() == {"prompt", "response"}


def test_another_seed_gives_other_problems() -> None:
    assert list(rl_rows("train", 20, seed=1)) == list(rl_rows("train", 20, seed=1))
    assert list(rl_rows("train", 20, seed=1)) != list(rl_rows("train", 20, seed=2))
