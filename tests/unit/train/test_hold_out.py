"""Rows that a run holds out of its training data."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fivefold.config.load import load_recipe
from fivefold.config.schema.preferences import DPORecipe
from fivefold.config.schema.sft import SFTRecipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.data.examples import Examples
from fivefold.dpo import LabelledAnswers
from fivefold.evaluate import Evaluator
from fivefold.sft import FineTuning
from fivefold.supervised import Setup
from fivefold.supervised import set_up as set_up_supervised
from fivefold.train_setup import set_up

RECIPES = Path(__file__).parents[3] / "recipes"
QUICKSTART = RECIPES / "quickstart.yaml"


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
    alone = Evaluator.of(recipe, setup.ground.tokenizer, setup.rewards, model=(setup.ground.path, setup.ground.shape))
    assert alone is not None
    assert [prompt.text for prompt in alone.data.prompts] == held


def supervised(recipe: DPORecipe) -> Setup[Any]:
    return set_up_supervised(recipe, LabelledAnswers(recipe))


def words(examples: Examples[Any]) -> list[tuple[tuple[int, ...], ...]]:
    return [tuple(example.parts()) for example in examples.examples]


def talk(n: int) -> list[dict[str, str]]:
    asked, answered = {"role": "user", "content": f"{n}+1="}, {"role": "assistant", "content": f"{n + 1}"}
    return [asked, answered, asked, answered]


@pytest.mark.parametrize(("hold_out", "n_held"), [(0.25, 3), (5, 5), (0.001, 1), (1, 1)])
def test_all_examples_of_a_row_are_on_one_side(tmp_path: Path, hold_out: float, n_held: int) -> None:
    """A conversation whose template forgets earlier answers is an example for each answer, a pair of KTO is two."""
    template = tmp_path / "forgets.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.content if loop.last or m.role == 'user' else m.content[:1] + '-' }}{% endfor %}"
    )
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps({"talk": talk(n)}) + "\n" for n in range(10, 22)))
    keys = ["valid_dataset=null", "train_dataset.batch_size=2", f"chat_template={template}"]
    of_talks = [f"train_dataset.path={tmp_path / 'talks.jsonl'}", "train_dataset.messages_key=talk"]
    share = [f"train_dataset.hold_out={hold_out}"]

    def sft(*overrides: str) -> tuple[Examples[Any], Examples[Any] | None]:
        recipe = load_recipe(RECIPES / "tiny-moe-sft.yaml", [*keys, *of_talks, *overrides], SFTRecipe)
        done = set_up_supervised(recipe, FineTuning(recipe))
        return done.data, done.valid

    whole, none = sft()
    trained, held = sft(*share)
    assert none is None
    assert held is not None
    assert (len(whole), len(trained), len(held)) == (24, 24 - 2 * n_held, 2 * n_held)
    assert sorted(words(trained) + words(held)) == sorted(words(whole))
    # Both answers of a conversation are about the same sum, so no sum is on both sides.
    assert {example[0][:2] for example in words(trained)}.isdisjoint(example[0][:2] for example in words(held))
    assert words(sft(*share)[0]) == words(trained)
    assert words(sft(*share, "seed=7")[0]) != words(trained)

    of_pairs = ["valid_dataset=null", "actor.loss_type=kto", "train_dataset.limit=12", "train_dataset.batch_size=2"]
    recipe = load_recipe(RECIPES / "quickstart-dpo.yaml", [*of_pairs, *share], DPORecipe)
    pairs = supervised(recipe)
    assert pairs.valid is not None
    assert (len(pairs.data), len(pairs.valid)) == (24 - 2 * n_held, 2 * n_held)
    assert len({pair.answer.prompt_ids for pair in pairs.valid.examples}) == n_held
    assert pairs.facts()["held out"] == f"{n_held} of {n_held} rows"
    assert pairs.facts()["answers"] == f"{12 - n_held} of {12 - n_held} rows"


@pytest.mark.parametrize("hold_out", ["12", "300"])
def test_no_row_is_left_to_train_on(hold_out: str) -> None:
    keys = ["valid_dataset=null", "train_dataset.limit=12", "train_dataset.batch_size=2"]
    for recipe, schema in (("quickstart-dpo", DPORecipe), ("quickstart", TrainRecipe)):
        loaded = load_recipe(RECIPES / f"{recipe}.yaml", [*keys, f"train_dataset.hold_out={hold_out}"], schema)
        start = partial(set_up, loaded) if isinstance(loaded, TrainRecipe) else partial(supervised, loaded)
        with pytest.raises(ValueError, match=rf"hold_out={hold_out} leaves no rows to train on, for there are 12"):
            start()
