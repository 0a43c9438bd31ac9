"""Prompts that a run holds out of its training data."""

from __future__ import annotations

from pathlib import Path

from fivefold.config.load import load_recipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.evaluate import Evaluator
from fivefold.train_setup import set_up

QUICKSTART = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"


def test_a_run_trains_on_the_prompts_that_it_does_not_hold_out(tmp_path: Path) -> None:
    rows = ["train_dataset.limit=200", f"cluster.fileroot={tmp_path}"]
    keys = ["valid_dataset=null", "train_dataset.hold_out=0.25", *rows]
    recipe = load_recipe(QUICKSTART, keys, TrainRecipe)
    setup = set_up(recipe)
    assert setup.evaluator is not None
    trained, held = ([prompt.text for prompt in data.prompts] for data in (setup.data, setup.evaluator.data))
    assert (len(trained), len(held)) == (150, 50)
    whole = set_up(load_recipe(QUICKSTART, ["valid_dataset=null", *rows], TrainRecipe))
    assert sorted(trained + held) == sorted(prompt.text for prompt in whole.data.prompts)
    assert whole.evaluator is None
    # `fivefold eval` loads them by itself.
    alone = Evaluator.of(recipe, setup.ground.tokenizer, setup.rewards)
    assert alone is not None
    assert [prompt.text for prompt in alone.data.prompts] == held
