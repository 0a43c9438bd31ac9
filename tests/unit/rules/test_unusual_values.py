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
