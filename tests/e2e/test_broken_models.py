"""A broken model folder is refused by every command before a process is started."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import ray

from fivefold import Run, generate
from fivefold.cluster.session import Session
from fivefold.config.load import load_recipe
from fivefold.config.schema.rollout import GenerationConfig
from fivefold.config.schema.train import TrainRecipe
from fivefold.evaluate import evaluate
from fivefold.train_setup import set_up
from tests.e2e.conftest import ROOT

QUICKSTART = ROOT / "recipes" / "quickstart.yaml"
TINY_MOE = ROOT / "fivefold" / "models" / "tiny-moe"
TRUNCATED = (
    r"model\.safetensors is truncated: it has 1,000,000 bytes, and its header describes 4,099,648: fetch it again"
)


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a model folder whose weight file is truncated."""
    # The recipes' folder of runs is then another one than that of the user.
    monkeypatch.chdir(tmp_path)
    folder = Path(shutil.copytree(TINY_MOE, tmp_path / "broken"))
    os.truncate(folder / "model.safetensors", 1_000_000)
    return folder


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it an error to start processes."""

    def start(*_: object) -> None:
        raise AssertionError("processes were started")

    monkeypatch.setattr(Session, "open", start)


def train_recipe(*overrides: str) -> TrainRecipe:
    return load_recipe(QUICKSTART, list(overrides), TrainRecipe)


def run_train(path: str) -> None:
    Run(train_recipe(f"actor.path={path}")).finish()


def run_reference(path: str) -> None:
    Run(train_recipe("actor.kl_ctl=0.1", f"ref.path={path}")).finish()


def run_sft(path: str) -> None:
    Run(ROOT / "recipes" / "tiny-moe-sft.yaml", [f"actor.path={path}", "actor.init_from_scratch=false"]).finish()


def run_evaluate(path: str) -> None:
    evaluate(train_recipe("rollout.backend=transformers:d2"), model=path)


def run_generate(path: str) -> None:
    generate.generate(path, ["1+2="], GenerationConfig(), seed=1, chat=False, dtype=None, device="cpu")


@pytest.mark.parametrize("command", [run_train, run_reference, run_sft, run_evaluate, run_generate])
def test_every_command_refuses_a_truncated_file(command: Callable[[str], None], broken: Path) -> None:
    with pytest.raises(ValueError, match=TRUNCATED):
        command(str(broken))
    assert not ray.is_initialized()


def test_the_snapshot_of_a_hub_name_is_checked(broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: {"org/model": str(broken)}[name])
    with pytest.raises(ValueError, match=TRUNCATED):
        set_up(train_recipe("actor.path=org/model"))


def test_weights_that_are_drawn_at_random_need_no_files(broken: Path) -> None:
    (broken / "model.safetensors").unlink()
    setup = set_up(train_recipe(f"actor.path={broken}", "actor.init_from_scratch=true"))
    assert setup.ground.path == str(broken)


def changed(folder: Path, file: str, **values: object) -> None:
    path = folder / file
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **values}))


ODD: dict[str, tuple[Callable[[Path], object], str]] = {
    "a value of another type": (lambda m: changed(m, "config.json", head_dim=float("nan")), "head_dim|config.json"),
    "a larger model": (
        lambda m: (m / "config.json").write_text('{"model_type": "llama"}'),
        r"describes a model of 6,738,415,616 parameters, and its weight files hold 135 tensors",
    ),
    "far more layers": (
        lambda m: (m / "config.json").write_text('{"model_type": "gpt2", "n_layer": 1000000000}'),
        r"describes a model of 1,000,000,000 layers",
    ),
    "an end that is no token": (
        lambda m: changed(m, "generation_config.json", eos_token_id="x"),
        "'x', and no token id",
    ),
    "no generation config": (
        lambda m: (m / "generation_config.json").write_text("null"),
        r"cannot be built from its .*generation_config\.json",
    ),
    "a broken tokenizer": (
        lambda m: changed(m, "tokenizer_config.json", model_max_length="\x00"),
        "has no usable tokenizer",
    ),
    "a pipe": (lambda m: os.mkfifo(m / "added_tokens.json"), r"added_tokens\.json is a pipe or a device"),
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_file_of_a_model_ends_in_a_message_that_names_it(tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(TINY_MOE, tmp_path / "odd"))
    change, words = ODD[name]
    change(folder)
    with pytest.raises(ValueError, match=words):
        run_generate(str(folder))
