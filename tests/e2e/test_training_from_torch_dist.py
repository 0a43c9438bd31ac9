"""A Megatron-Core checkpoint that does not fit is refused before a process is started.

The runs of test_resumed_runs.py start from one that fits.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fivefold.cli.main import app
from fivefold.cluster.session import Session
from fivefold.convert.megatron import convert_to_torch_dist
from tests.e2e.conftest import ROOT
from tests.e2e.documents import DOCS, indented_commands

QUICKSTART = ROOT / "recipes" / "quickstart.yaml"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model as a checkpoint, with its config and tokenizer, and without weights for Hugging Face."""
    folder = tmp_path_factory.mktemp("checkpoint") / "mcore"
    convert_to_torch_dist("package:tiny-moe", folder)
    return folder


def start(checkpoint: Path, model: Path | str) -> list[str]:
    """Return overrides that start a run from a checkpoint."""
    return [
        f"actor.path={model}",
        "actor.megatron.use_dist_checkpointing=true",
        f"actor.megatron.dist_checkpointing_path={checkpoint}",
    ]


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("processes were started")

    monkeypatch.setattr(Session, "open", fail)


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("command", ["plan", "train"])
def test_a_checkpoint_that_does_not_fit_is_refused(command: str, checkpoint: Path, tmp_path: Path) -> None:
    def refusal(*overrides: str) -> str:
        arguments = [command, str(QUICKSTART), f"cluster.fileroot={tmp_path / 'runs'}", *overrides]
        result = CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments)
        assert result.exit_code == 2, result.output
        return result.output

    missing = start(tmp_path / "nowhere", "package:tiny-moe")
    assert "actor.megatron.dist_checkpointing_path: there is no folder" in refusal(*missing)
    other = Path(shutil.copytree(ROOT / "fivefold" / "models" / "tiny-moe", tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "num_hidden_layers": config["num_hidden_layers"] + 1}))
    message = refusal(*start(checkpoint, other))
    assert "does not hold the model that config.json describes" in message
    assert "both must be of one model" in message
    truncated = Path(shutil.copytree(checkpoint, tmp_path / "truncated"))
    os.truncate(truncated / "__0_0.distcp", 1000)
    assert "__0_0.distcp is truncated: it has 1,000 bytes" in refusal(*start(truncated, "package:tiny-moe"))
    assert "dist_checkpointing_path is not set" in refusal("actor.megatron.use_dist_checkpointing=true")
    unread = refusal("actor.megatron.dist_checkpointing_path=x")
    assert "set actor.megatron.use_dist_checkpointing to true, or drop dist_checkpointing_path" in unread
    random = refusal(*start(checkpoint, checkpoint), "actor.init_from_scratch=true")
    assert "set actor.megatron.use_dist_checkpointing to false, or drop init_from_scratch" in random


@pytest.mark.usefixtures("nothing_starts")
def test_an_evaluation_does_not_take_other_weights_than_the_checkpoint(checkpoint: Path) -> None:
    words = ["eval", str(QUICKSTART), *start(checkpoint, "package:tiny-moe")]
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, words)
    assert result.exit_code == 2
    assert "convert it with `fivefold convert`, and name the Hugging Face folder with --model" in result.output


def test_a_plan_does_not_miss_weights_that_the_checkpoint_has(checkpoint: Path) -> None:
    words = ["plan", str(QUICKSTART), f"actor.path={checkpoint}"]
    assert "has no weights" in CliRunner(env={"COLUMNS": "400"}).invoke(app, words).output
    words += start(checkpoint, checkpoint)
    result = CliRunner(env={"COLUMNS": "400"}).invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "has no weights" not in result.output


@pytest.mark.usefixtures("nothing_starts")
def test_a_checkpoint_in_the_place_of_a_model_folder_is_told_apart(checkpoint: Path, tmp_path: Path) -> None:
    overrides = [f"actor.path={checkpoint}", f"cluster.fileroot={tmp_path}"]
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["train", str(QUICKSTART), *overrides])
    assert result.exit_code == 2
    assert "the folder is a Megatron-Core checkpoint" in result.output


@pytest.mark.usefixtures("nothing_starts")
def test_the_conversions_of_the_page_work(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "fivefold" / "models" / "tiny-moe", tmp_path / "models" / "Qwen3-30B-A3B")
    shutil.copytree(checkpoint, tmp_path / "checkpoints" / "iter_0000100")
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("100")
    shown = [words for _, words in indented_commands(DOCS / "converting.md") if words[0] == "convert"]
    assert len(shown) == 3
    for words in shown:
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, (words, result.output)
