"""Secrets of the environment reach no recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.config.interpolation import names_secret
from fivefold.config.load import load_recipe
from fivefold.config.problems import RecipeError
from fivefold.config.schema.train import TrainRecipe
from fivefold_import.recipe import import_recipe

QUICKSTART = Path(__file__).resolve().parents[3] / "recipes" / "quickstart.yaml"


def test_secrets_are_known_by_their_names() -> None:
    for name in ("KEY", "WANDB_API_KEY", "MY_APIKEY", "hf_token", "AWS_SECRET", "DB_PASSWORD", "GOOGLE_CREDENTIALS"):
        assert names_secret(name), name
    for name in ("TOKENIZER", "MAX_TOKENS", "KEYS_FILE", "MONKEY", "PWD", "HOME", "SECRETARY"):
        assert not names_secret(name), name


@pytest.mark.parametrize("text", ["${oc.env:MY_API_KEY}", "run-${oc.env:MY_API_KEY}", "${oc.env:MY_API_KEY,none}"])
@pytest.mark.parametrize("key", ["trial_name", "reward.kwargs.own"])
def test_an_interpolation_of_a_secret_is_refused(monkeypatch: pytest.MonkeyPatch, key: str, text: str) -> None:
    monkeypatch.setenv("MY_API_KEY", "s3cret")
    with pytest.raises(RecipeError, match=rf"{key}=.*the value of MY_API_KEY would be written") as caught:
        load_recipe(QUICKSTART, [f"{key}={text}"], TrainRecipe)
    assert "s3cret" not in str(caught.value)
    monkeypatch.setenv("MY_NAME", "ours")
    assert load_recipe(QUICKSTART, ["trial_name=${oc.env:MY_NAME}"], TrainRecipe).trial_name == "ours"


def test_the_importer_writes_no_secret(tmp_path: Path) -> None:
    script, recipe = tmp_path / "run.sh", tmp_path / "recipe.yaml"
    script.write_text("python3 -m verl.trainer.main_ppo trainer.project_name=$MY_API_KEY data.train_files=$DATA\n")
    import_recipe("verl", [script], [], recipe, environment={"MY_API_KEY": "s3cret", "DATA": "/d.parquet"})
    assert "s3cret" not in recipe.read_text()
    assert "/d.parquet" in recipe.read_text()
