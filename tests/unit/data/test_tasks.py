"""Public data sets become prompts with ground truths, whichever form their answers have."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
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


REPOSITORY = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: socratic
  data_files:
  - {split: train, path: socratic/train-*}
---
"""


@pytest.fixture
def modelscope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the package modelscope, which has one data set, laid out as its repositories are."""
    folder = tmp_path / "repository"
    for split, total in (("main/train", "1,072"), ("main/test", "8"), ("socratic/train", "5")):
        file = folder / f"{split}-00000-of-00001.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"question": [f"What of {split}?"], "answer": [f"Reasons.\n#### {total}"]}), file)
    (folder / "README.md").write_text(REPOSITORY)

    class HubError(Exception):
        pass

    def dataset_snapshot_download(name: str) -> str:
        if name != "AI-ModelScope/gsm8k":
            raise HubError("404")
        return str(folder)

    names = ("modelscope", "modelscope.hub", "modelscope.hub.errors")
    package, hub, errors = (ModuleType(name) for name in names)
    package.__dict__.update(hub=hub, dataset_snapshot_download=dataset_snapshot_download)
    hub.__dict__.update(errors=errors)
    errors.__dict__.update(HubError=HubError)
    for name, module in zip(names, (package, hub, errors), strict=True):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.usefixtures("modelscope")
def test_a_data_set_of_modelscope_becomes_the_same_files(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ["data", "gsm8k", "--source", "modelscope:AI-ModelScope/gsm8k:main", "--out", str(out)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    truths = {
        split: pq.read_table(out / f"{split}.parquet").column("reward_model").to_pylist() for split in ("train", "test")
    }
    assert truths == {
        "train": [{"ground_truth": "1072", "style": "rule"}],
        "test": [{"ground_truth": "8", "style": "rule"}],
    }


@pytest.mark.usefixtures("modelscope")
def test_a_name_that_modelscope_does_not_know_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ModelScope gives no data set 'no/such' \(404\): check the spelling"):
        write_task("gsm8k", "modelscope:no/such:main", tmp_path / "out")


def test_without_the_package_of_modelscope_the_error_names_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(ValueError, match=r"pip install 'fivefold\[modelscope\]'"):
        write_task("gsm8k", "modelscope:AI-ModelScope/gsm8k:main", tmp_path / "out")


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
    with pytest.raises(ValueError, match=r"has no column 'question'.*: give the files of openai/gsm8k:main, or rename"):
        write_task("gsm8k", str(file), tmp_path / "out")


def test_an_empty_source_is_no_name_of_the_hub(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the source '' is empty"):
        write_task("gsm8k", "", tmp_path / "out")


def test_one_in_eighty_problems_of_deepscaler_is_held_out(tmp_path: Path) -> None:
    source, out = tmp_path / "deepscaler", tmp_path / "out"
    source.mkdir()
    rows = [{"problem": f"{n} + 1?", "answer": str(n + 1)} for n in range(200)]
    (source / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    counts = write_task("deepscaler", str(source), out)
    assert counts == {out / "train.parquet": 198, out / "test.parquet": 2}
    truths = {}
    for split in ("train", "test"):
        written = pq.read_table(out / f"{split}.parquet").to_pylist()
        truths[split] = {row["reward_model"]["ground_truth"] for row in written}
        assert {row["extra_info"]["split"] for row in written} == {split}
    assert truths["test"] == {"80", "160"}
    assert not truths["train"] & truths["test"]
