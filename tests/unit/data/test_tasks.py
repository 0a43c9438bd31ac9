"""Public data sets become prompts with ground truths, whichever form their answers have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from datasets import load_dataset
from typer.testing import CliRunner

from fivefold.cli.main import app
from fivefold.data.tasks import after_hashes, last_boxed, write_task


def test_a_downloaded_folder_becomes_a_parquet_file_for_each_split(tmp_path: Path) -> None:
    source, out = tmp_path / "gsm8k", tmp_path / "out"
    source.mkdir()
    for split, total in (("train", "1,072"), ("test", "8")):
        row = {"question": f"What of {split}?", "answer": f"Some reasons.\n#### {total}"}
        (source / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    result = CliRunner().invoke(app, ["data", "gsm8k", "--source", str(source), "--out", str(out)])
    assert result.exit_code == 0, result.output
    files = {split: str(out / f"{split}.parquet") for split in ("train", "test")}
    rows = load_dataset("parquet", data_files=files, cache_dir=str(tmp_path / "cache"))
    (first,) = rows["train"]
    assert first["reward_model"] == {"style": "rule", "ground_truth": "1072"}
    assert first["data_source"] == "openai/gsm8k"
    (message,) = first["prompt"]
    assert message["role"] == "user"
    assert message["content"].startswith("What of train? Let's think step by step")
    assert rows["test"][0]["reward_model"]["ground_truth"] == "8"


def test_a_single_file_becomes_one_parquet_file(tmp_path: Path) -> None:
    file = tmp_path / "aime.json"
    file.write_text(json.dumps([{"problem": "p", "answer": 204}]))
    assert write_task("aime24", str(file), tmp_path / "out") == {tmp_path / "out" / "aime.parquet": 1}


def test_answers_are_taken_from_solutions() -> None:
    assert after_hashes("6*12=72\n#### 1,072") == "1072"
    assert last_boxed(r"so \fbox{\text{(C)}} it is") == r"\text{(C)}"
    assert last_boxed(r"first \boxed{1}, which gives $\boxed 25$.") == "25"
    assert last_boxed(r"first \boxed{1}, then \boxed{\frac{1}{2}}.") == r"\frac{1}{2}"
    with pytest.raises(ValueError, match=r"no .boxed"):
        last_boxed("The answer is 3.")
    for solution in ("6*12=72, so 72.", "6*12=72\n####  "):
        with pytest.raises(ValueError, match="no answer behind ####"):
            after_hashes(solution)


def test_an_answer_in_another_form_names_its_row(tmp_path: Path) -> None:
    file = tmp_path / "math.jsonl"
    file.write_text(json.dumps({"problem": "p", "solution": "3"}) + "\n")
    with pytest.raises(ValueError, match=r"row 1 of .*column 'solution': no "):
        write_task("math", str(file), tmp_path / "out")
    with pytest.raises(ValueError, match="has no column 'question'"):
        write_task("gsm8k", str(file), tmp_path / "out")
