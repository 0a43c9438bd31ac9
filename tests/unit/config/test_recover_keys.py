"""Keys that say when a run is saved, and how it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fivefold.config.load import load_recipe, resolved_yaml
from fivefold.config.problems import RecipeError
from fivefold.config.schema.fields import parse_duration
from fivefold.config.schema.train import TrainRecipe

MINIMAL = "experiment_name: e\nactor: {path: m}\ntrain_dataset: {path: d}\n"


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(MINIMAL)
    return path


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("3h55m", 14_100), ("90m", 5_400), ("45s", 45), ("1d12h", 129_600), ("1.5h", 5_400), (900, 900), (0.5, 0.5)],
)
def test_a_duration_is_read_in_seconds(text: Any, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "h", "3h 55m", "55m3h", "3:55", "ten minutes", "-5m", "5", True, None, [3], "٣m."]
)
def test_a_text_that_is_no_duration_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match="is not a duration: write units"):
        parse_duration(text)


def test_a_run_is_saved_every_quarter_of_an_hour_unless_the_recipe_says_otherwise(recipe_file: Path) -> None:
    default = load_recipe(recipe_file, [], TrainRecipe).recover
    assert (default.mode, default.is_enabled, default.freq_secs) == ("auto", True, 900)
    changed = load_recipe(
        recipe_file, ["recover.mode=disabled", "recover.save_before=3h55m", "saver.freq_secs=2h"], TrainRecipe
    )
    assert not changed.recover.is_enabled
    assert (changed.recover.save_before, changed.saver.freq_secs) == (14_100, 7_200)
    recipe_file.write_text(resolved_yaml(changed))
    assert load_recipe(recipe_file, [], TrainRecipe) == changed


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("recover.save_before=soon", "recover.save_before: 'soon' is not a duration"),
        ("recover.save_before=0s", "recover.save_before='0s': must be greater than 0"),
        ("recover.freq_secs=99999d", "recover.freq_secs='99999d': must be at most 100,000,000"),
        ("recover.max_to_keep=0", "recover.max_to_keep=0: must be at least 1"),
        ("recover.accept_changes=[train_dataset, train_data]", "'train_data', which is no key of this recipe"),
        ("recover.accept_changes=[train_dataset.pth]", "'train_dataset.pth', which is no key of this recipe"),
        ("recover.keep_best=eval/accuracy", "is measured on held-out prompts: set valid_dataset.path"),
    ],
)
def test_a_wrong_value_is_refused_in_words(recipe_file: Path, override: str, problem: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe_file, [override], TrainRecipe)
    (line,) = caught.value.problems
    assert problem in line
