"""A recipe that has keys of Megatron-Core or of another framework in their places is told what to write."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from fivefold.config.keys import known_keys
from fivefold.config.library_names import _OTHERS
from fivefold.config.load import load_recipe
from fivefold.config.other_names import MEANINGS, WITHOUT
from fivefold.config.problems import RecipeError
from fivefold.config.schema.train import TrainRecipe

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "recipes" / "quickstart.yaml"
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
    "rollout.n=4": "did you mean gconfig.n_samples?",
    "num_generations=4": "did you mean gconfig.n_samples?",
    "actor.kl_loss_coef=0.1": "did you mean actor.kl_ctl?",
    "rollout.gpu_memory_utilization=0.5": "did you mean rollout.memory_fraction?",
    "actor.optimizer.type=muon": "the optimizer is AdamW: drop it",
    "actor.lora_rank=8": "adapters (LoRA) are not supported",
    "actor_rollout_ref.model.path=m": "files of verl have it: `fivefold import FILE` converts them",
}


@pytest.mark.parametrize(("override", "hint"), KEYS.items())
def test_a_key_of_another_place_is_told_what_takes_its_place(override: str, hint: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(RECIPE, [override], TrainRecipe)
    assert "unknown key" in str(caught.value)
    assert hint in str(caught.value)


def test_no_key_of_a_recipe_has_a_name_that_is_told_to_be_anothers() -> None:
    named = {key.rpartition(".")[2] for key in known_keys(TrainRecipe)}
    assert not named & (_OTHERS.keys() | MEANINGS.keys() | WITHOUT.keys())


def test_what_other_names_mean_are_keys_and_what_an_importer_takes_them_for() -> None:
    assert set(MEANINGS.values()) <= set(known_keys(TrainRecipe))
    imported: dict[str, set[str]] = {}
    for table in (ROOT / "fivefold_import").glob("*/keys.yaml"):
        for section in yaml.safe_load(table.read_text()).values():
            for name, row in (section.get("to") or {}).items() if isinstance(section, dict) else ():
                imported.setdefault(name.rpartition(".")[2], set()).add(row[0])
    # TRL's beta and epsilon are KL's weight and the clip range; other frameworks' files use the words for other things.
    both = {name: key for name, key in MEANINGS.items() if name in imported and name not in ("beta", "epsilon")}
    assert len(both) >= 15
    assert {name: imported[name] for name, key in both.items() if key not in imported[name]} == {}
