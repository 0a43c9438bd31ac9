"""A recipe that has keys of Megatron-Core or of another framework in their places is told what to write."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.config.keys import known_keys
from fivefold.config.library_names import _OTHERS
from fivefold.config.load import load_recipe
from fivefold.config.problems import RecipeError
from fivefold.config.schema.train import TrainRecipe

RECIPE = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"
KEYS = {
    "actor.megatron.recompute_granularity=full": "set recompute: none, selective or full",
    "actor.megatron.tensor_model_parallel_size=2": "the layout decides it: set backend",
    "actor.megatron.moe_enable_deepep=true": "set token_dispatcher",
    "actor.megatron.use_precision_aware_optimizer=true": "formats of the state can be chosen without it",
    "actor.megatron.exp_avg_dtype=float32": "did you mean actor.megatron.optimizer.exp_avg_dtype",
    "actor.megatron.param_offload=true": "set offload.params of the role",
    "actor.infer_batch_size=2": "set mb_spec.max_tokens_per_infer_mb",
    "ref.infer_batch_size=2": "and mb_spec.max_tokens_per_mb of another",
    "ref.mb_spec.max_tokens_per_infer_mb=2": "did you mean ref.mb_spec.max_tokens_per_mb?",
    "teacher.mb_spec.max_tokens_per_infer_mb=2": "did you mean teacher.mb_spec.max_tokens_per_mb?",
    "reward.model.mb_spec.max_tokens_per_infer_mb=2": "did you mean reward.model.mb_spec.max_tokens_per_mb?",
    "actor.gradient_accumulation_steps=4": "set ppo_n_minibatches",
}


@pytest.mark.parametrize(("override", "hint"), KEYS.items())
def test_a_key_of_another_place_is_told_what_takes_its_place(override: str, hint: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(RECIPE, [override], TrainRecipe)
    assert "unknown key" in str(caught.value)
    assert hint in str(caught.value)


def test_no_key_of_a_recipe_has_a_name_that_is_told_to_be_anothers() -> None:
    assert not {key.rpartition(".")[2] for key in known_keys(TrainRecipe)} & _OTHERS.keys()
