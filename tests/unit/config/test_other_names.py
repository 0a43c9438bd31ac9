"""A recipe that has keys of Megatron-Core or of another framework in their places is told what to write."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import yaml

from fivefold.config.keys import known_keys
from fivefold.config.library_names import _OTHERS
from fivefold.config.load import load_recipe
from fivefold.config.other_names import MEANINGS, SECTIONS, WITHOUT
from fivefold.config.problems import RecipeError
from fivefold.config.schema.sft import SFTRecipe
from fivefold.config.schema.train import TrainRecipe
from fivefold_import.framework import Framework

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
    "actor.ppo_mini_batch_size=64": "set actor.ppo_n_minibatches, the number of mini-batches of a step",
    "scale_rewards=false": "set actor.reward_norm.std_level: group, batch or none",
    "actor.lora_rank=8": "set actor.lora.rank",
    "actor_rollout_ref.model.path=m": "files of verl have it: `fivefold import FILE --from verl -o RECIPE`",
}


@pytest.mark.parametrize(("override", "hint"), KEYS.items())
def test_a_key_of_another_place_is_told_what_takes_its_place(override: str, hint: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(RECIPE, [override], TrainRecipe)
    assert "unknown key" in str(caught.value)
    assert hint in str(caught.value)


def test_only_keys_of_the_recipe_at_hand_are_named() -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(ROOT / "recipes" / "tiny-moe-sft.yaml", ["learning_rate=1", "num_generations=4"], SFTRecipe)
    assert "learning_rate=1: unknown key; did you mean actor.optimizer.lr?" in str(caught.value)
    assert "gconfig" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "framework"),
    [
        (["data.train_files=a", "actor_rollout_ref.rollout.n=4"], "verl"),
        (["actor.clip_ratio_low=0.2", "actor.clip_ratio_high=0.3"], "verl"),
        (["trainer.total_epochs=1", "data.max_prompt_length=8"], "verl"),
        (["trainer.n=1", "explorer.n=1", "buffer.n=1"], "trinity"),
        (["actor_train.n=1", "actor_infer.n=1"], "roll"),
        (["actor.clip_ratio_low=0.2", "zzz=1"], None),
        (["num_generations=4", "beta=0.1"], None),
    ],
)
def test_a_recipe_with_several_keys_of_a_framework_is_said_to_look_like_it(
    overrides: list[str], framework: str | None
) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(RECIPE, overrides, TrainRecipe)
    said = [line for line in caught.value.problems if line.startswith("this looks like")]
    wanted = f"this looks like {framework}: `fivefold import FILE --from {framework} -o RECIPE` converts its files"
    assert [line.startswith(wanted) for line in said] == ([] if framework is None else [True])


def test_the_frameworks_are_words_of_the_command_that_imports() -> None:
    assert {owner for owners in SECTIONS.values() for owner in owners} <= set(get_args(Framework))


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
    # TRL's beta and epsilon are KL's weight and the clip range, and verl's clip_ratio is too; other frameworks' files
    # use the words for other things.
    others = ("beta", "epsilon", "clip_ratio")
    both = {name: key for name, key in MEANINGS.items() if name in imported and name not in others}
    assert len(both) >= 15
    assert {name: imported[name] for name, key in both.items() if key not in imported[name]} == {}
