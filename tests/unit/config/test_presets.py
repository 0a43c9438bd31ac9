"""Algorithms and other names that set several keys at once."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from fivefold.config.algorithms import ALGORITHMS, CORRECTIONS, AlgorithmName, CorrectionName, deviations
from fivefold.config.keys import known_keys
from fivefold.config.load import load_recipe, resolved_yaml
from fivefold.config.methods import ADVANTAGES, LOSSES
from fivefold.config.problems import RecipeError
from fivefold.config.schema.train import TrainRecipe

SECTIONS = {"environment": ["environment.game=g:G", "reward.fn=environment"]}
"""Sections without the key `path`."""
TEXT = "experiment_name: e\nactor: {path: m}\ntrain_dataset: {path: d}\n"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(TEXT)
    return path


def test_every_name_has_its_keys_and_every_key_exists() -> None:
    assert ALGORITHMS.keys() == set(get_args(AlgorithmName))
    assert CORRECTIONS.keys() == set(get_args(CorrectionName))
    known = set(known_keys(TrainRecipe))
    for algorithm in ALGORITHMS.values():
        assert algorithm.keys.keys() <= known
        assert algorithm.keys.get("actor.loss", "ppo") in LOSSES
        assert algorithm.keys.get("actor.advantage", "grpo") in ADVANTAGES
    for correction in CORRECTIONS.values():
        assert {f"actor.rollout_correction.{key}" for key in correction.keys} <= known


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_an_algorithm_sets_its_keys_unless_the_recipe_writes_them(name: str, recipe: Path, tmp_path: Path) -> None:
    algorithm = ALGORITHMS[name]
    section = [] if algorithm.needs is None else SECTIONS.get(algorithm.needs, [f"{algorithm.needs}.path=m"])
    loaded = load_recipe(recipe, [f"algorithm={name}", *section], TrainRecipe)
    values = loaded.model_dump()
    for key, wanted in algorithm.keys.items():
        value = values
        for part in key.split("."):
            value = value[part]
        assert value == wanted, key
    assert deviations(loaded) == []
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(resolved_yaml(loaded))
    assert load_recipe(resolved, [], TrainRecipe) == loaded


def test_an_algorithm_without_the_section_that_it_needs_is_refused(recipe: Path) -> None:
    for name, algorithm in ALGORITHMS.items():
        if algorithm.needs is not None:
            with pytest.raises(RecipeError, match=algorithm.needs):
                load_recipe(recipe, [f"algorithm={name}"], TrainRecipe)


def test_what_a_recipe_writes_takes_precedence_and_is_reported(recipe: Path) -> None:
    loaded = load_recipe(recipe, ["algorithm=gspo", "actor.eps_clip=0.2"], TrainRecipe)
    assert (loaded.actor.eps_clip, loaded.actor.eps_clip_higher) == (0.2, 4e-4)
    assert deviations(loaded) == ["actor.eps_clip=0.2 (gspo: 0.0003)"]


def test_a_users_own_loss_and_advantage_are_told(recipe: Path) -> None:
    overrides = ["actor.loss=mine.py:Loss", "actor.advantage=mine:advantage"]
    loaded = load_recipe(recipe, overrides, TrainRecipe)
    assert deviations(loaded) == ["actor.loss=mine.py:Loss", "actor.advantage=mine:advantage"]


def test_interpolations_see_what_the_algorithm_sets(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALGORITHM", "gspo")
    words = ["algorithm=${oc.env:ALGORITHM}", "actor.entropy_coeff=${actor.eps_clip}"]
    loaded = load_recipe(recipe, words, TrainRecipe)
    assert (loaded.actor.loss, loaded.actor.entropy_coeff) == ("gspo", 3e-4)


def test_a_correction_sets_its_bounds(recipe: Path) -> None:
    key = "actor.rollout_correction"
    correction = load_recipe(
        recipe, [f"{key}.method=icepop", f"{key}.mask_below=0.4"], TrainRecipe
    ).actor.rollout_correction
    assert (correction.weight, correction.mask, correction.mask_above, correction.mask_below) == (
        "token",
        "token",
        5,
        0.4,
    )


STALE = "rollout.max_head_offpolicyness=1"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["algorithm=gpso"], "algorithm='gpso'.*did you mean gspo"),
        (
            ["actor.rollout_correction.weight=token"],
            "no effect with actor.rollout_correction.method=auto: set method to custom",
        ),
        (["actor.rollout_correction.method=custom"], "method=custom corrects nothing"),
        (
            ["actor.rollout_correction.method=tis", "rollout.logprob_share=0.5"],
            "needs the rollout's log-probs of every",
        ),
        (
            ["actor.rollout_correction.method=tis", "gconfig.top_p=0.9"],
            "with top_p the rollout gives log-probs of another",
        ),
        (["actor.rollout_correction.method=mis", "actor.recompute_logprob=false"], "weights losses by p / q, but with"),
        (["algorithm=m2po", "actor.recompute_logprob=false", "actor.loss=reinforce"], "they are the same"),
        ([STALE, "algorithm=m2po", "actor.prox_logp_method=loglinear"], "second_moment needs old log-probs before"),
        (
            [
                "actor.rollout_correction={method: tis, weight_normalized: true}",
                *("actor.recompute_logprob=false", "actor.loss=reinforce"),
            ],
            "they are the same",
        ),
        (
            ["actor.rollout_correction={method: geo_mask, weight_normalized: true}"],
            "weight_normalized=true has no effect",
        ),
        (["actor.opsm_delta=0.1"], "no effect with one update a step"),
        (
            ["actor.sample_weights.reward_power=3"],
            "reward_power=3 has no effect with actor.sample_weights.reward=null: set .*reward to power",
        ),
        (["actor.kl_unbiased=true"], "no effect with actor.kl_ctl=0"),
        (
            ["rollout.max_concurrent_rollouts=8"],
            "max_concurrent_rollouts=8 has no effect with rollout.max_head_offpolicy",
        ),
        (["rollout.recompute_kv_cache=false"], "rollout.recompute_kv_cache=false has no effect"),
        ([STALE, "actor.dynamic_sampling=true"], "samples further completions with the weights of the step itself"),
        ([STALE, "algorithm=remax"], "actor.advantage=remax samples further"),
        (["rollout.new_tokens_per_chunk=64"], "new_tokens_per_chunk=64 has no effect with rollout.max_head_offpolicy"),
        (
            [STALE, "gconfig.top_p=0.9"],
            "the age of samples .* with top_p the rollout gives log-probs of another",
        ),
        (
            [STALE, "rollout.logprob_share=0.5"],
            "the age of samples .* rollout.logprob_share=0.5 asks for a part of them",
        ),
        (["actor.prox_logp_method=loglinear"], "interpolates by the age of samples"),
        (
            [STALE, "actor.prox_logp_method=loglinear", "actor.recompute_logprob=true"],
            "says where old log-probs come from, got actor.recompute_logprob=true: set .* to null",
        ),
        (
            [STALE, "actor.prox_logp_method=loglinear", "gconfig.top_k=5", "actor.rollout_correction.method=none"],
            "loglinear needs the model's log-probs of sampled tokens",
        ),
        (["actor.kl_target=0.1"], "adapts the weight of the KL term, got actor.kl_ctl=0: raise actor.kl_ctl"),
        (["actor.overlong_reward_penalty=true", "actor.overlong_tokens=2000"], "above gconfig.max_new_tokens=1024"),
        (["algorithm=rloo", "gconfig.n_samples=1"], "compares the completions of a group"),
        (["actor.advantage=asymre", "gconfig.n_samples=1"], "advantage=asymre compares the completions of a group"),
        (["algorithm=dapo", "gconfig.n_samples=1"], "gconfig.n_samples is 1"),
        (["algorithm=remax", "gconfig.n_samples=1", "actor.dynamic_sampling=true"], "looks for groups with different"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(words: list[str], message: str, recipe: Path) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe(recipe, words, TrainRecipe)
