"""Values that nobody trains with are told; a recipe of ours has none."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.config.keys import known_keys
from fivefold.config.load import load_any_recipe, load_recipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.rules.unusual import USUAL, unusual_values

RECIPES = Path(__file__).parents[3] / "recipes"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("actor.optimizer.lr=1e5", "actor.optimizer.lr=100000 is far from usual values, which are from 1e-09 to 0.05"),
        ("actor.megatron.optimizer.decoupled_lr=4", "actor.megatron.optimizer.decoupled_lr=4 is far"),
        ("actor.megatron.transformer.moe_aux_loss_coeff=1e308", "moe_aux_loss_coeff=1e+308 is far"),
        ("actor.reward_norm.eps=1e9", "actor.reward_norm.eps=1e+09 is far"),
        ("evaluator.freq_secs=1e-320", "evaluator.freq_secs="),
    ],
)
def test_an_odd_value_is_told(override: str, line: str) -> None:
    [found] = unusual_values(load_recipe(RECIPES / "quickstart.yaml", [override], TrainRecipe))
    assert line in found


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_recipe_that_ships_has_none(path: Path) -> None:
    assert list(unusual_values(load_any_recipe(path, []))) == []


def test_the_table_names_keys() -> None:
    keys = set(known_keys(TrainRecipe))
    assert all(any(key == name or key.endswith(f".{name}") for key in keys) for name in USUAL)


@pytest.mark.parametrize(("keys", "is_noted"), [({}, True), ({"optimizer": {"lr": 1e-6}}, False)])
def test_a_rate_that_nobody_chose_for_adapters_is_noted(keys: dict[str, object], is_noted: bool) -> None:
    values = {
        "experiment_name": "e",
        "actor": {"path": "m", "lora": {"rank": 4}, **keys},
        "train_dataset": {"path": "d"},
    }
    notes = [note for note in unusual_values(TrainRecipe.model_validate(values)) if "actor.lora trains with" in note]
    assert len(notes) == is_noted
    without = {**values, "actor": {"path": "m"}}
    assert not any("lora" in note for note in unusual_values(TrainRecipe.model_validate(without)))
