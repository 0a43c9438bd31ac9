"""A frozen model reads the actor's tokens: their tokenizers must agree, and not the sizes of their vocabularies."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fivefold.bridge.hf_reader import resolve_model_folder
from fivefold.config.load import load_recipe
from fivefold.config.roles import roles_of
from fivefold.config.schema.train import TrainRecipe
from fivefold.families.read import load_shape
from fivefold.roles.checks import check_tokenizers, check_weight_files
from fivefold.rollout.tokenizer import load_tokenizer
from fivefold.rules.recipe import check_recipe

RECIPE = Path(__file__).resolve().parents[3] / "recipes" / "quickstart-distill.yaml"
ACTOR = "package:tiny-moe"
VOCAB = 128


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The actor's model in a folder of its own."""
    return Path(shutil.copytree(resolve_model_folder(ACTOR), tmp_path / "teacher"))


def pad(folder: Path, vocab: int) -> None:
    """Give a model another number of rows in its vocabulary."""
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": vocab}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = min(vocab, VOCAB)
        padded = torch.zeros(vocab, weights[name].shape[1])
        padded[:rows] = weights[name][:rows]
        weights[name] = padded
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def change_tokenizer(folder: Path, change: Any) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    change(tokenizer["model"]["vocab"])
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def swap_two(vocabulary: dict[str, int]) -> None:
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]


def check(folder: Path, *words: str) -> None:
    recipe = load_recipe(RECIPE, [f"teacher.path={folder}", *words], TrainRecipe)
    actor = resolve_model_folder(ACTOR)
    check_recipe(recipe, load_shape(actor), {"teacher": load_shape(folder)})
    check_tokenizers(recipe, roles_of(recipe).values(), load_shape(actor), load_tokenizer(str(actor)))
    check_weight_files(recipe, roles_of(recipe).values())


def test_a_vocabulary_may_be_padded_to_another_size(folder: Path) -> None:
    check(folder)
    pad(folder, VOCAB + 64)
    check(folder)
    with pytest.raises(
        ValueError, match=r"192 tokens in its vocabulary, the actor 128: .* set actor\.distill\.over=sampled"
    ):
        check(folder, "actor.distill.over=top_k")


def test_a_vocabulary_has_all_tokens_of_the_actor(folder: Path) -> None:
    last = max(load_tokenizer(str(folder)).get_vocab().values())
    pad(folder, last + 1)
    check(folder)
    pad(folder, last)
    with pytest.raises(ValueError, match=f"has {last} tokens, and the actor's tokenizer goes up to token {last}"):
        check(folder)


def test_other_tokens_in_a_vocabulary_of_the_same_size_are_refused(folder: Path) -> None:
    change_tokenizer(folder, swap_two)
    with pytest.raises(ValueError, match=r"reads other tokens than the actor's: token \d+ is '.*' in its tokenizer"):
        check(folder)


def test_a_folder_without_a_tokenizer_needs_the_actors_size(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    check(folder)
    pad(folder, VOCAB + 64)
    with pytest.raises(ValueError, match="has 192 tokens, the actor 128, and no tokenizer that shows"):
        check(folder)
