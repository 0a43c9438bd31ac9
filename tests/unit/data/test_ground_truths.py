"""Ground truths: those that load can be compared and logged, and all others are refused with row and column."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast

from fivefold.config.schema.data import DatasetConfig
from fivefold.data.prompts import load_prompts
from fivefold.experience.samples import as_record
from fivefold.observe.jsonl import JsonLines
from fivefold.types import Sample

Write = Callable[..., str]
ROW = {"prompt": "1+1=", "answer": "2"}


@pytest.mark.parametrize(
    ("answer_key", "row", "where"),
    [
        ("answer", {"prompt": "a", "answer": None}, "row 2 of .*: column 'answer' is null"),
        (None, {"prompt": "a", "reward_model": {"ground_truth": None}}, r"row 2 of .*: reward_model.ground_truth is n"),
        ("answer", {"prompt": "a", "answer": ["2", None]}, r"row 2 of .*: column 'answer'\[1\] is null"),
        ("answer", {"prompt": "a", "answer": {"x": [float("inf")]}}, r"row 2 of .*: column 'answer'.x\[0\] holds inf"),
    ],
)
def test_a_ground_truth_that_cannot_be_compared_is_refused(
    tokenizer: PreTrainedTokenizerFast, write_jsonl: Write, answer_key: str | None, row: dict[str, Any], where: str
) -> None:
    first = {**ROW, "reward_model": {"ground_truth": "2"}}
    with pytest.raises(ValueError, match=where):
        load_prompts(DatasetConfig(path=write_jsonl([first, row]), answer_key=answer_key), tokenizer)


@pytest.mark.parametrize("value", [b"2", [date(2020, 1, 2)], {"by": Decimal("1")}])
def test_types_of_parquet_that_json_does_not_have_are_refused(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, value: Any
) -> None:
    path = tmp_path / "data.parquet"
    pq.write_table(pa.Table.from_pylist([{"prompt": "a", "answer": value}]), path)
    with pytest.raises(ValueError, match=r"row 1 of .*: column 'answer'.* holds .*, a (Decimal|date|bytes): a ground"):
        load_prompts(DatasetConfig(path=str(path), answer_key="answer"), tokenizer)


def test_every_ground_truth_that_loads_can_be_logged_with_its_sample(
    tokenizer: PreTrainedTokenizerFast, write_jsonl: Write, tmp_path: Path
) -> None:
    truths = ["2", 2, 2.5, True, ["1", 2], {"target": 24, "numbers": [4, 6], "hint": None}, "é", "\ud800"]
    path = write_jsonl([{"prompt": "a", "answer": truth} for truth in truths])
    data = load_prompts(DatasetConfig(path=path, answer_key="answer"), tokenizer)
    assert [prompt.ground_truth for prompt in data.prompts] == truths
    with JsonLines(tmp_path / "samples.jsonl") as file:
        for prompt in data.prompts:
            file.write(as_record(Sample(prompt, "b", "stop", 2, 1, (0, 0), {"math": 1.0})))
    written = (tmp_path / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["ground_truth"] for line in written] == truths


def test_usage_counts_rows(tokenizer: PreTrainedTokenizerFast, write_jsonl: Write) -> None:
    path = write_jsonl([{"prompt": "x" * n, "answer": "1"} for n in (1, 9, 2)])
    for max_length, usage in [(4, "2 of 3 rows, 1 too long"), (40, "3 of 3 rows")]:
        config = DatasetConfig(path=path, answer_key="answer", max_length=max_length)
        assert load_prompts(config, tokenizer).usage == usage
