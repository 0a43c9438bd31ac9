"""Each fixture is converted to its golden file, and what follows from several keys is what arithmetic says."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import yaml
from dialect_conversion import FIXTURES, SOURCES, leaves
from golden import converted, golden

from fivefold_import.framework import Framework

DERIVED: dict[str, dict[str, Any]] = {
    "areal_grpo_fsdp.yaml": {
        "actor.rollout_correction.method": "custom",  # the decoupled objective, whose weights have a cap
        "saver.max_to_keep": None,  # AReaL keeps them all
    },
    "nemo_rl_base.yaml": {
        "actor.backend": "fsdp:d4t2",
        "actor.mb_spec.max_tokens_per_mb": 4096 * 2,  # ${mul:...}
        "actor.mb_spec.max_tokens_per_infer_mb": 4096 * 4,
        "actor.ppo_n_minibatches": 32 * 8 // 128,
        "actor.optimizer.warmup_steps_proportion": 10 / 400,
        "valid_dataset.limit": 480 // 16,  # the set is read 16 times
        "evaluator.n_samples": 16,
        "recover.save_before": 3 * 3600 + 40 * 60,
    },
    "nemo_rl_moe.yaml": {
        "actor.backend": "megatron:d2p3t2c2e4",  # 24 of 32 devices, in replicas of 12
        "rollout.backend": "vllm:d2t4",  # the other 8
        "actor.optimizer.min_lr_ratio": 0.1,
        "actor.overlong_penalty_factor": 1 / 2,  # rewards are doubled after the penalty here, before it there
        "actor.reward_bias": -0.5,
    },
    "nemo_rl_ppo.yaml": {"critic.backend": "fsdp:d8", "critic.ppo_n_minibatches": 64 // 16},
    "nemo_rl_dpo.yaml": {"actor.mb_spec.max_tokens_per_mb": 2 * 2 * 2048},  # a pair is two sequences
    "miles_lora.sh": {"actor.ppo_n_minibatches": 16 * 8 // 128},
    "skyrl_megatron.sh": {
        "actor.backend": "megatron:d2p2t4e8",
        "actor.mb_spec.max_tokens_per_mb": 4 * (2048 + 8192),
        "actor.ppo_n_minibatches": 512 // 32,
    },
    "skyrl_async_search.sh": {
        "actor.backend": "fsdp:d2c2",
        "rollout.backend": "vllm:d2t2",
        "cluster.n_gpus_per_node": 4 + 4,
        "environment.max_length": 6144 + 512,
        "actor.mb_spec.max_tokens_per_mb": 2 * (6144 + 512),
    },
    "slime_moe.sh": {
        "actor.backend": "megatron:d2p2t2c2e4",
        "actor.mb_spec.max_tokens_per_mb": 8192 * 2,  # the budget of each of 2 context shards
        "actor.optimizer.warmup_steps_proportion": 20 / (500 * 4),
    },
    "slime_async_ppo.sh": {
        "cluster.n_gpus_per_node": 8,  # 4 that train and 4 that generate
        "rollout.backend": "sglang:d2t2",
        "actor.ppo_n_minibatches": 32 * 4 // 64,
    },
    "roll_megatron.yaml": {
        "experiment_name": "roll_megatron",  # the file's name
        # 32 devices in stages of t2: 8 replicas of 2 stages, each in 8 chunks; whole experts, 4 ways
        "actor.backend": "megatron:d8p2v8t2e4",
        "critic.backend": "megatron:d8p2v8t2e4",  # the manual has no block for it: it is laid out as the actor
    },
    "roll_grpo_moe.yaml": {
        "actor.backend": "megatron:d2p2v6c4e4",  # 16 devices / (p2 * c4)
        "actor.mb_spec.max_tokens_per_mb": 1024 + 3072,
        "actor.mb_spec.max_tokens_per_infer_mb": 2 * (1024 + 3072),
        "ref.mb_spec.max_tokens_per_mb": 2 * (1024 + 3072),
        "actor.megatron.transformer.moe_aux_loss_coeff": 0.001,  # the model's own config.json has it
        "actor.ppo_n_minibatches": 64 * 8 // (1 * 64 * 2),
        "actor.c_clip": 1 + 2 * 0.25,
    },
    "roll_ppo_deepspeed.yaml": {
        "actor.mb_spec.max_tokens_per_mb": 2 * 1536,
        "critic.mb_spec.max_tokens_per_mb": 2 * 1536,
        "rollout.device_mapping": "0-1",  # both take turns on the first two devices
        "gconfig.max_new_tokens": 1536 - 512,
    },
    "roll_distillation.yaml": {
        "reward.model.backend": "megatron:d1t4",  # 4 devices of its own
        "teacher.backend": "megatron:d2p2",  # on the actor's 4 devices
    },
    "roll_sft.yaml": {"actor.mb_spec.max_tokens_per_mb": 2 * 2048, "train_dataset.batch_size": 2 * 4 * 4},
    "roll_dpo.yaml": {"train_dataset.batch_size": 4 * 2 * 2},
    "siirl_megatron.sh": {
        "actor.backend": "megatron:d2p2t2",  # 8 / (t2 * p2)
        "actor.mb_spec.max_tokens_per_mb": 4 * (1024 + 2048),
        "actor.ppo_n_minibatches": 96 // 24,
    },
    "siirl_moe.sh": {
        "actor.backend": "megatron:d2p2t4e4",  # whole experts
        "actor.mb_spec.max_tokens_per_mb": 1536 * 6,
        "actor.ppo_n_minibatches": 64 // 16,
    },
    "trinity_grpo.yaml": {
        "actor.backend": "fsdp:d2c2",  # 8 devices less the explorer's 4, in pairs that share a sequence
        "actor.mb_spec.max_tokens_per_mb": 2 * 12288,  # the budget of each of 2 context shards
        "train_dataset.max_length": 1280 - 768,
        "valid_datasets.others.max_length": 1280 - 768,
    },
    "trinity_ppo_megatron.yaml": {
        # 8 devices less the explorer's 4. Experts are split as attention is: e2 * t2 fill the 4.
        "actor.backend": "megatron:(attn:d2t2|ffn:d1t2e2)",
        "actor.mb_spec.max_tokens_per_mb": 3 * (256 + 1024),
        "critic.backend": "megatron:(attn:d2t2|ffn:d1t2e2)",  # by its own keys, which say the same
        "critic.mb_spec.max_tokens_per_mb": 3 * (256 + 1024),
    },
    "trinity_mix.yaml": {"expert_dataset.batch_size": 8 * 8 // 4},
    "trinity_dpo.yaml": {"actor.mb_spec.max_tokens_per_mb": 2 * 1536},
    "verl_grpo_megatron.sh": {
        "actor.backend": "megatron:d2p2t2",  # 8 / (t2 * p2)
        "actor.mb_spec.max_tokens_per_mb": 4 * (1024 + 1024),
        "actor.mb_spec.max_tokens_per_infer_mb": 4 * (1024 + 1024),
        "ref.mb_spec.max_tokens_per_mb": 4 * (1024 + 1024),
        "actor.ppo_n_minibatches": 512 // 128,
    },
    "verl_moe_megatron.sh": {
        "trial_name": "moe",  # `moe-$(date +%m%d)`, where no command is run
        # 64 devices in 4 stages of 16. Experts are split as attention is: e2 * t2 leave 4 expert replicas.
        "actor.backend": "megatron:(attn:d4p4t2c2|ffn:d4t2e2)",
        "actor.mb_spec.max_tokens_per_mb": 2 * 8192,  # the budget of each of 2 context shards
        "actor.optimizer.warmup_steps_proportion": 10 / 100,
        "actor.ppo_n_minibatches": 256 // 64,
        "gconfig.max_new_tokens": 6 * 1024,
        "train_dataset.max_length": 2 * 1024,
    },
    "verl_ppo_fsdp.sh": {
        "actor.mb_spec.max_tokens_per_mb": 16 * (512 + 512),
        "actor.ppo_n_minibatches": 256 // 64,
        "critic.mb_spec.max_tokens_per_mb": 32 * (512 + 512),
        "critic.ppo_n_minibatches": 256 // 64,  # as the actor's, which verl takes too
    },
    "verl_critic_megatron.sh": {
        "critic.backend": "megatron:(attn:d4t2|ffn:d1t2e4)",
        "critic.mb_spec.max_tokens_per_mb": 4 * (512 + 512),
        "critic.optimizer.warmup_steps_proportion": 10 / 50,
        "critic.ppo_n_minibatches": 512 // 128,
    },
    "verl_async_fsdp.sh": {
        # The trainer takes 4 times 3 x 32 prompts, in mini-batches of 32, before the rollout gets its weights.
        "train_dataset.batch_size": 4 * 3 * 32,
        "actor.ppo_n_minibatches": 12,
        "total_train_steps": 4000 // 384,
        "actor.optimizer.warmup_steps": 10 * 3,  # A step of verl's makes 3 updates.
        "rollout.max_head_offpolicyness": 1,
    },
    "verl_trainer.yaml": {"actor.mb_spec.max_tokens_per_mb": 2 * (512 + 1536)},
    "verl_sft_fsdp.yaml": {"actor.mb_spec.max_tokens_per_mb": 8 * 2048},
}
"""Keys of recipes whose values follow from several keys of the source."""


@pytest.mark.parametrize(("framework", "fixture"), SOURCES)
def test_a_fixture_is_converted_to_its_golden_file(framework: Framework, fixture: str) -> None:
    assert converted(framework, fixture) == golden(fixture).read_text(encoding="utf-8")


def test_every_golden_file_is_compared() -> None:
    fixtures = {name for _, name in SOURCES}
    assert {path.name for path in FIXTURES.iterdir()} == fixtures | {golden(name).name for name in fixtures}
    assert {framework for framework, _ in SOURCES} == set(get_args(Framework))


@pytest.mark.parametrize("fixture", DERIVED)
def test_golden_files_have_the_values_that_follow_from_several_keys(fixture: str) -> None:
    recipe = dict(leaves(yaml.safe_load(golden(fixture).read_text(encoding="utf-8"))["recipe"]))
    assert {key: recipe[key] for key in DERIVED[fixture]} == DERIVED[fixture]
