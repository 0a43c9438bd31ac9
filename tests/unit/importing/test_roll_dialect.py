"""ROLL: roles with lists of devices, micro-batches in sequences, updates counted by accumulation."""

from __future__ import annotations

from pathlib import Path

import pytest
from dialect_conversion import convert_fixture, convert_text

TRAIN, INFER = "actor_train.", "actor_infer."
CONFIG = "strategy_args.strategy_config."
ACCUMULATION = TRAIN + "training_args.gradient_accumulation_steps"


def test_blocks_of_roles_become_a_layout_on_their_devices() -> None:
    """32 devices in stages of t2: 8 replicas of 2 stages, each in 8 chunks; whole experts, 4 ways."""
    conversion = convert_fixture("roll", "roll_megatron.yaml")
    assert conversion.recipe["actor.backend"] == "megatron:d8p2v8t2e4"
    assert (conversion.recipe["cluster.n_nodes"], conversion.recipe["cluster.n_gpus_per_node"]) == (4, 8)
    assert conversion.recipe["rollout.backend"] == "transformers:d*"
    assert conversion.recipe["actor.megatron.recompute"] == "selective"
    assert conversion.report.to_give == ("actor.path", "train_dataset.path")


def test_degrees_batches_and_lengths() -> None:
    conversion = convert_fixture("roll", "roll_grpo_moe.yaml")
    expected = {
        "experiment_name": "moe-run-7",
        "cluster.n_nodes": 4,
        "actor.backend": "megatron:d2p2v6c4e4",  # 16 devices / (p2 * c4)
        "ref.backend": "megatron:d16e4",
        "rollout.backend": "vllm:d8t2",
        "rollout.colocate": False,
        "actor.mb_spec.max_tokens_per_mb": 1024 + 3072,
        "actor.ppo_n_minibatches": 64 * 8 // (1 * 64 * 2),
        "actor.optimizer.warmup_steps_proportion": 8 / (200 * 4),
        "actor.c_clip": 1 + 2 * 0.25,
        "actor.loss_aggregation": "sequence_sum",
        "actor.kl_ctl": 0.002,
        "actor.kl_estimator": "k3",
        "actor.megatron.recompute": "full",
        "gconfig.max_new_tokens": 3072,
        "evaluator.n_samples": 2,
        "evaluator.greedy": False,
        "train_dataset.answer_key": "ground_truth",
        "reward.fn": "math",
    }
    assert conversion.recipe.items() >= expected.items()
    assert conversion.unsupported() == {
        "system_envs.SOME_SWITCH",
        "advantage_clip",
        "validation.generating_args.top_p",
        "validation.generating_args.top_k",
    }


@pytest.mark.parametrize(
    ("rollout", "colocate", "backend", "is_unsupported"),
    [
        ("list(range(0,16))", True, "vllm:d8t2", False),
        ("list(range(8,24))", True, "vllm:d8t2", True),
        ("list(range(0,8))", True, "vllm:d8t2", True),
        ("[16, 17]", False, "vllm:d1t2", False),
        ("16-19", False, "vllm:d2t2", False),
    ],
)
def test_lists_of_devices_say_who_shares(rollout: str, colocate: bool, backend: str, is_unsupported: bool) -> None:
    conversion = convert_fixture("roll", "roll_grpo_moe.yaml", overrides=[f"{INFER}device_mapping='{rollout}'"])
    assert conversion.recipe["rollout.colocate"] is colocate
    assert conversion.recipe["rollout.backend"] == backend
    assert (INFER + "device_mapping" in conversion.unsupported()) is is_unsupported


@pytest.mark.parametrize(
    ("overrides", "unsupported"),
    [
        ([f"{TRAIN}device_mapping=range(0,16"], {TRAIN + "device_mapping"}),
        # 12 devices hold no whole replicas of p2 * c4.
        (
            [f"{TRAIN}device_mapping='list(range(0,12))'"],
            {TRAIN + "device_mapping", TRAIN + CONFIG + "context_parallel_size"},
        ),
        ([f"{TRAIN}{CONFIG}expert_model_parallel_size=3"], {TRAIN + CONFIG + "expert_model_parallel_size"}),
        ([f"{TRAIN}{CONFIG}tensor_model_parallel_size=two"], {TRAIN + CONFIG + "tensor_model_parallel_size"}),
    ],
)
def test_layouts_that_cannot_be_are_unsupported(overrides: list[str], unsupported: set[str]) -> None:
    conversion = convert_fixture("roll", "roll_grpo_moe.yaml", overrides=overrides)
    assert unsupported <= conversion.unsupported()
    assert conversion.recipe["actor.backend"].startswith("megatron:")


def test_expert_tensor_degree_is_1_unless_written() -> None:
    degree = f"{TRAIN}{CONFIG}tensor_model_parallel_size=2"
    overrides = [degree, f"{TRAIN}{CONFIG}context_parallel_size=2"]
    recipe = convert_fixture("roll", "roll_grpo_moe.yaml", overrides=overrides).recipe
    assert recipe["actor.backend"] == "megatron:d2p2v6t2c2e4"
    overrides += [f"{TRAIN}{CONFIG}expert_tensor_parallel_size=2"]
    recipe = convert_fixture("roll", "roll_grpo_moe.yaml", overrides=overrides).recipe
    assert recipe["actor.backend"] == "megatron:(attn:d2p2v6t2c2|ffn:d1t2e4)"


def test_updates_that_do_not_divide_the_batch_are_unsupported() -> None:
    conversion = convert_fixture("roll", "roll_grpo_moe.yaml", overrides=[f"{ACCUMULATION}=48"])
    assert "512" in conversion[ACCUMULATION].note or "64 prompts of 8" in conversion[ACCUMULATION].note
    assert {ACCUMULATION, TRAIN + "training_args.warmup_steps"} <= conversion.unsupported()


def test_ppo_with_a_critic_is_unsupported_and_what_is_left_is_trained_with_grpo() -> None:
    conversion = convert_fixture("roll", "roll_ppo_deepspeed.yaml")
    assert conversion.unsupported() == {
        "adv_estimator",
        "gamma",
        "lambd",
        "target_kl",
        "critic.model_args.dtype",
        "critic.training_args.learning_rate",
        "critic.device_mapping",
        ACCUMULATION,
        TRAIN + CONFIG + "zero_optimization.stage",
        INFER + "device_mapping",
    }
    expected = {
        "actor.backend": "megatron:d4",
        "actor.megatron.recompute": "full",  # ROLL's default
        "rollout.backend": "transformers:d4",
        "gconfig.max_new_tokens": 1536 - 512,
        "actor.mb_spec.max_tokens_per_mb": 2 * 1536,
        "actor.kl_in": "reward",
        "actor.kl_estimator": "k2",
        "actor.kl_ctl": 0.1,
        "actor.reward_norm.mean_level": "batch",
        "train_dataset.prompt_key": "question",
    }
    assert conversion.recipe.items() >= expected.items()


def test_packing_gives_the_budget_itself(tmp_path: Path) -> None:
    text = """
    pretrain: some/model
    prompt_length: 100
    response_length: 200
    actor_train:
      use_sequence_packing: true
      sequence_packing_args: {max_packed_sequence_length_train: 4096}
      training_args: {per_device_train_batch_size: 2, gradient_accumulation_steps: 1}
    """
    conversion = convert_text("roll", tmp_path, text)
    assert conversion.recipe["actor.mb_spec.max_tokens_per_mb"] == 4096
    assert conversion["actor_train.training_args.per_device_train_batch_size"].outcome == "implied"


def test_rewards_of_several_domains_are_left_to_the_user(tmp_path: Path) -> None:
    text = """
    pretrain: some/model
    rewards:
      sums: {worker_cls: a.b.MathRuleRewardWorker, world_size: 2}
      code: {worker_cls: a.b.CodeSandboxRewardWorker, world_size: 2, use_local: true}
    """
    conversion = convert_text("roll", tmp_path, text)
    assert conversion.unsupported() == {"rewards.sums.worker_cls", "rewards.code.worker_cls", "rewards.code.use_local"}
