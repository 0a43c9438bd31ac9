"""Keys that change nothing are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.config.load import load_recipe
from fivefold.config.schema.sft import SFTRecipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.families.read import find_shape
from fivefold.rules.unused import unused_keys

RECIPES = Path(__file__).parents[3] / "recipes"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], []),
        (["actor.kl_in=reward"], ["actor.kl_in=reward has no effect: actor.kl_ctl is 0"]),
        (["actor.kl_in=reward", "actor.kl_estimator=k1", "actor.kl_ctl=0.1"], []),
        (["actor.kl_estimator=k2"], ["actor.kl_estimator=k2 has no effect: actor.kl_ctl is 0"]),
        (["actor.reward_norm.eps=0.1"], []),
        (["actor.gae_lambda=0.9"], ["actor.gae_lambda=0.9 has no effect: actor.advantage is grpo"]),
        (["actor.gae_lambda=0.9", "algorithm=ppo", "critic={path: m, backend: 'megatron:d2'}"], []),
        (
            ["actor.reward_norm.std_level=none", "actor.reward_norm.eps=0.1"],
            ["actor.reward_norm.eps=0.1 has no effect: actor.reward_norm.std_level is none"],
        ),
        (["algorithm=rloo", "actor.eps_clip_higher=null"], []),
        (
            ["actor.loss=sapo", "actor.eps_clip_higher=0.3"],
            ["actor.eps_clip_higher=0.3 has no effect: actor.loss is sapo"],
        ),
        (["actor.loss=gmpo", "actor.c_clip=3.0"], ["actor.c_clip=3 has no effect: actor.loss is gmpo"]),
        (
            ["actor.loss=gspo"],
            [
                "actor.eps_clip=0.2 clips next to nothing: actor.loss=gspo compares it with the mean ratio of a whole "
                "sequence, for which algorithm=gspo has 0.0003 and 0.0004"
            ],
        ),
        (["actor.loss=gspo", "actor.eps_clip=3e-3"], []),
        (["algorithm=gspo"], []),
        (["actor.loss_length=9"], ["actor.loss_length=9 has no effect: actor.loss_aggregation is token_mean"]),
        (
            ["actor.overlong_tokens=9"],
            ["actor.overlong_tokens=9 has no effect: actor.overlong_reward_penalty is false"],
        ),
        (
            ["actor.advantage=opo", "actor.reward_norm.std_level=none"],
            ["actor.reward_norm.std_level=none has no effect: actor.advantage is opo"],
        ),
        (["algorithm=gdpo", "actor.reward_norm.eps=0.1"], []),
        (["total_train_epochs=3"], ["total_train_epochs=3 has no effect: total_train_steps is 48"]),
        (["total_train_epochs=3", "total_train_steps=null"], []),
        (
            ["recover.mode=disabled", "recover.freq_steps=5"],
            ["recover.freq_steps=5 has no effect: recover.mode is disabled"],
        ),
        (
            ["actor.fsdp.forward_prefetch=2", "actor.fsdp.optimizer.state_on=host"],
            [
                "actor.fsdp.forward_prefetch=2 has no effect: actor.backend is megatron",
                "actor.fsdp.optimizer.state_on=host has no effect: actor.backend is megatron",
            ],
        ),
        (["actor.backend=fsdp:d2", "actor.fsdp.forward_prefetch=2"], []),
        (
            ["actor.backend=fsdp:d2", "actor.megatron.transformer.moe_aux_loss_coeff=0.1"],
            ["actor.megatron.transformer.moe_aux_loss_coeff=0.1 has no effect: actor.backend is fsdp"],
        ),
        (
            ["algorithm=ppo", "critic={path: m, backend: 'megatron:d2'}", "critic.fsdp.logprob_chunk_size=64"],
            ["critic.fsdp.logprob_chunk_size=64 has no effect: critic.backend is megatron"],
        ),
        (
            ["actor.offload.params=true"],
            ["actor.offload.params=true has no effect: the actor computes in CPU processes"],
        ),
        (
            ["actor.offload.grads=false", "cluster.n_gpus_per_node=3"],
            ["actor.offload.grads=false has no effect: no other role shares the actor's GPUs"],
        ),
        (
            [
                "actor.offload.grads=false",
                "cluster.n_gpus_per_node=2",
                "rollout={backend: 'transformers:d2', colocate: true}",
            ],
            [],
        ),
        (["profile.memory=false"], ["profile.memory=false has no effect: profile.steps is []"]),
        (["scheduler.wait_s=5"], ["scheduler.wait_s=5 has no effect: scheduler.type is local"]),
        (["actor.rollout_correction.auto_threshold=1e-4"], []),
        (
            ["actor.rollout_correction.auto_threshold=1e-4", "gconfig.top_k=9"],
            [
                "actor.rollout_correction.auto_threshold=0.0001 has no effect: gconfig.top_k changes the "
                "distribution that is sampled, so that auto corrects nothing",
                "actor.rollout_correction.method=auto has no effect: gconfig.top_k changes the "
                "distribution that is sampled, whose mismatch is not measured",
            ],
        ),
        (
            ["actor.rollout_correction.auto_threshold=1e-4", "actor.rollout_correction.method=tis"],
            ["actor.rollout_correction.auto_threshold=0.0001 has no effect: actor.rollout_correction.method is tis"],
        ),
    ],
)
def test_keys_of_a_training_recipe_that_others_switch_off(overrides: list[str], expected: list[str]) -> None:
    recipe = load_recipe(RECIPES / "quickstart.yaml", ["actor.kl_ctl=0", *overrides], TrainRecipe)
    assert list(unused_keys(recipe, find_shape("package:tiny-moe"))) == expected


def test_a_dense_model_needs_no_word_on_a_mismatch_that_is_not_measured() -> None:
    recipe = load_recipe(RECIPES / "quickstart.yaml", ["gconfig.top_p=0.9"], TrainRecipe)
    assert unused_keys(recipe, find_shape("Qwen3-8B")) == ()
    assert len(unused_keys(recipe, find_shape("package:tiny-moe"))) == 1


def test_keys_of_experts_change_nothing_on_a_dense_model() -> None:
    overrides = ["actor.megatron.router_dtype=model", "actor.megatron.token_dispatcher=allgather"]
    for name, kind in (("quickstart.yaml", TrainRecipe), ("tiny-moe-sft.yaml", SFTRecipe)):
        recipe = load_recipe(RECIPES / name, overrides, kind)
        assert unused_keys(recipe, find_shape("package:tiny-moe")) == ()
        lines = unused_keys(recipe, find_shape("Qwen3-8B"))
        assert lines == (
            "actor.megatron.router_dtype=model has no effect: qwen3 has no experts",
            "actor.megatron.token_dispatcher=allgather has no effect: qwen3 has no experts",
        )
