"""Rows in ROLL's schema: their domains, and tests of programs that the reward `code` runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from fivefold.config.schema.data import DatasetConfig
from fivefold.data.rows import load_rows
from fivefold.rewards.code_tests import AssertTest, OutputTest, ValueTest, read_tests
from fivefold.rewards.detection import Detection

Write = Callable[[list[dict[str, Any]]], str]
READER = {"reader": "fivefold.data.roll:rows", "reader_kwargs": {"domains": {"KodCode": "code"}}}


def read(write: Write, *rows: dict[str, Any], **keys: Any) -> list[dict[str, Any]]:
    """Return the rows of a file, as the reader gives them."""
    return load_rows(DatasetConfig.model_validate({"path": write(list(rows)), **READER, **keys}))


def test_a_row_has_the_domain_of_its_tag_unless_it_has_its_own(write_jsonl: Write) -> None:
    rows = [{"tag": "KodCode"}, {"tag": "aime"}, {"tag": "KodCode", "domain": "chat"}, {"tag": "x", "domain": None}]
    found = read(write_jsonl, *({"ground_truth": "7", "difficulty": "0.5", **row} for row in rows))
    assert [row["data_source"] for row in found] == ["code", "math_rule", "chat", "math_rule"]
    assert {row["ground_truth"] for row in found} == {"7"}
    assert found[1]["extra_info"] == {"tag": "aime", "id": "", "difficulty": 0.5}


def test_a_row_with_boxes_says_how_they_are_scored(write_jsonl: Write) -> None:
    ratios = {"iou_max_label_first": 1.0, "iou_max_iou_first": 2, "iou_completeness": 0.3, "map": 0.5}
    reward = {"ground_truth": "<answer>[]</answer>", "format_ratio": 0.2}
    rows = [
        {"reward_model": {**reward, "verifier_parm": {"det_reward_ratio": ratios, "det_verifier_normalized": False}}},
        {"reward_model": {**reward, "verifier_parm": {"det_reward_ratio": dict.fromkeys(ratios)}}},
        {"reward_model": reward},
    ]
    first, *others = read(write_jsonl, *({"data_source": "KodCode", **row} for row in rows))
    assert (first["data_source"], first["ground_truth"]) == ("code", "<answer>[]</answer>")
    scores = {"by_label": 1.0, "by_overlap": 0.0, "completeness": 0.3, "map": 0.5, "map50": 0.0, "map75": 0.0}
    assert first["extra_info"]["detection"] == {**scores, "format_weight": 0.2, "pixels_per_token": None}
    Detection(**first["extra_info"]["detection"])
    assert not [row for row in others if "detection" in row["extra_info"]]


CASES: list[tuple[str, str, list[dict[str, str]], list[Any]]] = [
    ("assert", "", [{"assert_code": "assert f(1) == 2"}], [AssertTest(["assert f(1) == 2"])]),
    (
        "pytest",
        "",
        [{"assert_code": "def test_a():\n    assert f(1) == 2"}],
        [AssertTest(["def test_a():\n    assert f(1) == 2\ntest_a()"])],
    ),
    (
        "check_based",
        "",
        [{"assert_code": "def check(f):\n    assert f(1) == 2\n\n    assert f(2) == 4", "entry_point": "double"}],
        [
            AssertTest(
                [
                    "def check(f):\n    assert f(1) == 2\ncheck(double)",
                    "def check(f):\n    assert f(2) == 4\ncheck(double)",
                ]
            )
        ],
    ),
    ("input", "None", [{"stdin": "1\n", "expected_stdout": "2\n"}], [OutputTest("1\n", "2\n")]),
    ("input", "f", [{"stdin": '1\n"a"', "expected_stdout": "[2]"}], [ValueTest("f", [1, "a"], [2])]),
]


@pytest.mark.parametrize(("kind", "function", "cases", "tests"), CASES)
def test_the_tests_of_a_program_are_the_ground_truth(
    write_jsonl: Write, kind: str, function: str, cases: list[dict[str, str]], tests: list[Any]
) -> None:
    row = {"case_type": kind, "test_case_function": function, "test_cases": json.dumps(cases), "ground_truth": ""}
    assert read_tests(read(write_jsonl, row)[0]["ground_truth"]) == tests
    assert read_tests(read(write_jsonl, {**row, "test_cases": cases})[0]["ground_truth"]) == tests


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"case_type": "text", "test_cases": []}, "row 1: .*case_type=text tests a response as a text"),
        ({"case_type": "assert"}, "row 1: the tests have another form: 'test_cases'"),
        (
            {"case_type": "check_based", "test_cases": [{"assert_code": "a", "import_prefix": "import os"}]},
            "import_prefix comes before a program",
        ),
    ],
)
def test_tests_of_another_form_are_refused(write_jsonl: Write, row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(write_jsonl, row)
    with pytest.raises(ValueError, match="is one file, which has no split 'test'"):
        read(write_jsonl, {}, split="test")
