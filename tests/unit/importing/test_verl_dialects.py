"""verl, and siiRL with its key tree: launch scripts and trainers' YAML."""

from __future__ import annotations

from pathlib import Path

import pytest
from dialect_conversion import ENVIRONMENT, convert_fixture, convert_text

from fivefold.importing.framework import Framework

ACTOR = "actor_rollout_ref.actor."
ROLLOUT = "actor_rollout_ref.rollout."
MEGATRON = ACTOR + "megatron."


def test_a_script_with_escaped_variables_in_an_array() -> None:
    conversion = convert_fixture("siirl", "siirl_megatron.sh")
    expected = {
        "experiment_name": "siirl_sums_grpo",
        "trial_name": "small_megatron",
        "cluster.fileroot": "/home/someone/ckpts/small_grpo_sums_1nodes",
        "actor.path": "/home/someone/models/Qwen3-8B",
        "actor.backend": "megatron:d2p2t2",  # 8 / (t2 * p2)
        "rollout.backend": "vllm:d4t2",
        "rollout.colocate": True,
        "train_dataset.batch_size": 96,
        "actor.ppo_n_minibatches": 96 // 24,
        "actor.mb_spec.max_tokens_per_mb": 4 * (1024 + 2048),
        "actor.optimizer.gradient_clipping": 0.5,
        "actor.c_clip": 3.0,  # siiRL's default
        "stats.tensorboard": True,
        "saver.freq_steps": 30,
    }
    assert conversion.recipe.items() >= expected.items()
    assert "evaluator.freq_steps" not in conversion.recipe
    assert conversion.unsupported() == {
        MEGATRON + "param_offload",
        "trainer.resume_mode",
    }


def test_the_environment_and_overrides_scale_a_script() -> None:
    environment = {**ENVIRONMENT, "PET_NNODES": "3"}
    recipe = convert_fixture("siirl", "siirl_megatron.sh", environment=environment).recipe
    assert recipe["train_dataset.batch_size"] == 3 * 96
    assert recipe["actor.backend"] == "megatron:d6p2t2"
    recipe = convert_fixture("siirl", "siirl_megatron.sh", overrides=["trainer.n_gpus_per_node=4"]).recipe
    assert recipe["actor.backend"] == "megatron:d1p2t2"


def test_siirl_keeps_experts_whole_unless_told() -> None:
    conversion = convert_fixture("siirl", "siirl_moe.sh")
    expected = {
        "actor.backend": "megatron:d2p2t4e4",
        "rollout.backend": "vllm:d4t4",
        "actor.mb_spec.max_tokens_per_mb": 1536 * 6,
        "actor.ppo_n_minibatches": 4,
        "actor.reward_norm.std_level": "none",
        "actor.reward_scaling": 5 / 4,  # leave-one-out of 5
    }
    assert conversion.recipe.items() >= expected.items()
    assert {ACTOR + "use_cpgd_loss", "dag.workflow_path", "algorithm.workflow_type"} <= conversion.unsupported()


def test_verl_splits_experts_as_attention_unless_told() -> None:
    """64 devices, p4: stages of 16 ranks. Experts over e2 * t2 leave 4 expert replicas."""
    conversion = convert_fixture("verl", "verl_moe_megatron.sh")
    assert conversion.recipe["actor.backend"] == "megatron:(attn:d4p4t2c2|ffn:d4t2e2)"
    environment = {**ENVIRONMENT, "ACTOR_ETP": "1"}
    conversion = convert_fixture("verl", "verl_moe_megatron.sh", environment=environment)
    assert conversion.recipe["actor.backend"] == "megatron:d4p4t2c2e2"
    assert conversion[MEGATRON + "expert_tensor_parallel_size"].outcome == "mapped"


def test_verl_falls_back_to_whole_experts_where_split_ones_do_not_fit() -> None:
    """16 devices, p4, c2: stages of 4 ranks, where e4 leaves no room for t2."""
    environment = {**ENVIRONMENT, "NNODES": "2", "ACTOR_EP": "4"}
    conversion = convert_fixture("verl", "verl_moe_megatron.sh", environment=environment)
    assert conversion.recipe["actor.backend"] == "megatron:d1p4t2c2e4"
    assert any("expert tensor degree" in note for note in conversion.report.notes)


def test_moe_options_and_algorithm() -> None:
    conversion = convert_fixture("verl", "verl_moe_megatron.sh")
    expected = {
        "actor.megatron.router_dtype": "fp32",
        "actor.megatron.recompute": "selective",
        "actor.mb_spec.max_tokens_per_mb": 2 * 8192,  # of each of 2 context shards
        "actor.eps_clip": 0.2,
        "actor.eps_clip_higher": 0.28,
        "actor.c_clip": 10.0,
        "actor.loss_aggregation": "sequence_mean",
        "actor.ppo_n_minibatches": 256 // 64,
        "actor.optimizer.warmup_steps_proportion": 10 / 100,
        "gconfig.n_samples": 16,
        "total_train_steps": 100,
        "cluster.n_nodes": 8,
    }
    assert conversion.recipe.items() >= expected.items()
    assert ACTOR + "megatron.override_transformer_config.recompute_modules" in conversion.unsupported()


def test_a_dense_model_with_a_reference_of_its_own_layout() -> None:
    conversion = convert_fixture("verl", "verl_grpo_megatron.sh")
    expected = {
        "experiment_name": "sums_grpo",
        "trial_name": "7b-megatron",
        "actor.backend": "megatron:d2p2t2",
        "ref.backend": "megatron:d2t4",
        "rollout.backend": "sglang:d2t4",
        "actor.ppo_n_minibatches": 512 // 128,
        "actor.mb_spec.max_tokens_per_mb": 4 * 2048,
        "actor.kl_in": "loss",
        "actor.kl_ctl": 0.001,
        "actor.kl_estimator": "k3",
        "actor.reward_norm.mean_level": "group",
        "actor.reward_norm.std_level": "none",
        "actor.optimizer.lr_scheduler_type": "cosine",
        "evaluator.greedy": False,
        "evaluator.temperature": 0.6,
        "evaluator.n_samples": 4,
        "train_dataset.path": "/home/someone/data/sums/train.parquet",
    }
    assert conversion.recipe.items() >= expected.items()
    assert conversion.unsupported() == {"trainer.logger"}
    assert any("CUDA_DEVICE_MAX_CONNECTIONS" in note for note in conversion.report.notes)


def test_ppo_with_a_critic() -> None:
    conversion = convert_fixture("verl", "verl_ppo_fsdp.sh")
    expected = {
        "actor.backend": "megatron:d8",
        "actor.megatron.recompute": "full",  # verl's default
        "actor.kl_in": "reward",
        "actor.kl_ctl": 0.01,
        "actor.kl_estimator": "k1",
        "gconfig.n_samples": 1,
        "actor.reward_norm.mean_level": "batch",
    }
    assert conversion.recipe.items() >= expected.items()
    assert conversion.unsupported() == {
        "algorithm.adv_estimator",
        "critic.optim.lr",
        "critic.model.path",
        "critic.ppo_micro_batch_size_per_gpu",
        ACTOR + "fsdp_config.optimizer_offload",
    }


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_fsdp_becomes_megatron_and_says_what_differs(strategy: str, tmp_path: Path) -> None:
    words = (
        f"{ACTOR}strategy={strategy} {ACTOR}ulysses_sequence_parallel_size=2 {ACTOR}fsdp_config.wrap_policy.min_num_params=0 "
        f"{ACTOR}fsdp_config.forward_prefetch=True {ACTOR}fsdp_config.param_offload=True {ACTOR}fsdp_config.fsdp_size=4 "
        f"{MEGATRON}override_transformer_config.moe_z_loss_coeff=0.1 trainer.nnodes=2 "
        "actor_rollout_ref.model.enable_gradient_checkpointing=True"
    )
    conversion = convert_text("verl", tmp_path, f"python3 -m t {words}")
    assert conversion.recipe["actor.backend"] == "megatron:d8c2"
    assert "Megatron-Core trains in its place" in conversion[ACTOR + "strategy"].note
    assert any("optimizer's states only" in note and "--search" in note for note in conversion.report.notes)
    checkpointing = conversion["actor_rollout_ref.model.enable_gradient_checkpointing"]
    assert (checkpointing.to, checkpointing.result) == ("actor.megatron.recompute", "full")
    assert conversion.unsupported() == {ACTOR + "fsdp_config.param_offload", ACTOR + "fsdp_config.fsdp_size"}
    # Megatron-Core's options had no effect there.
    assert "actor.megatron.transformer.moe_z_loss_coeff" not in conversion.recipe


def test_gradient_checkpointing_that_is_off_recomputes_nothing(tmp_path: Path) -> None:
    switch = "actor_rollout_ref.model.enable_gradient_checkpointing"
    conversion = convert_text("verl", tmp_path, f"python3 -m t {ACTOR}strategy=fsdp {switch}=False")
    assert conversion[switch].outcome == "implied"
    assert "actor.megatron.recompute" not in conversion.recipe


@pytest.mark.parametrize(
    ("degrees", "layout", "lost"), [((8, 6), "megatron:d32p2t4", {"pp", "vpp"}), ((2, 5), "megatron:d32p2t4", {"vpp"})]
)
def test_layers_that_do_not_divide_into_equal_stages(
    degrees: tuple[int, int], layout: str, lost: set[str], tmp_path: Path
) -> None:
    """94 layers: 1, 2, 47 or 94 stages."""
    keys = {"pp": MEGATRON + "pipeline_model_parallel_size", "vpp": MEGATRON + "virtual_pipeline_model_parallel_size"}
    words = (
        "actor_rollout_ref.model.path=Qwen/Qwen3-235B-A22B trainer.nnodes=32 "
        f"{MEGATRON}tensor_model_parallel_size=4 {MEGATRON}expert_tensor_parallel_size=1 "
        f"{keys['pp']}={degrees[0]} {keys['vpp']}={degrees[1]}"
    )
    conversion = convert_text("verl", tmp_path, f"python3 -m t {words}")
    assert conversion.recipe["actor.backend"] == layout
    assert conversion.unsupported() == {keys[degree] for degree in lost}


def test_adams_options_of_megatron(tmp_path: Path) -> None:
    option = ACTOR + "optim.override_optimizer_config.decoupled_weight_decay"
    conversion = convert_text("verl", tmp_path, f"python3 -m t {ACTOR}strategy=megatron +{option}=False")
    assert conversion.recipe["actor.megatron.optimizer.decoupled_weight_decay"] is False


def test_a_trainers_yaml() -> None:
    conversion = convert_fixture("verl", "verl_trainer.yaml", environment={"TRAIN_FILE": "/other.parquet"})
    expected = {
        "train_dataset.path": "/other.parquet",
        "train_dataset.prompt_key": "question",
        "actor.backend": "megatron:d4c2",
        "actor.ppo_n_minibatches": 1,
        "actor.mb_spec.max_tokens_per_mb": 2 * 2048,
        "actor.reward_norm.mean_level": "batch",
        "actor.reward_norm.std_level": "batch",
        "actor.optimizer.warmup_steps_proportion": 0.05,
        "gconfig.top_k": 0,
    }
    assert conversion.recipe.items() >= expected.items()
    assert "ref.backend" not in conversion.recipe
    assert conversion["critic.strategy"].outcome == "implied"


@pytest.mark.parametrize("framework", ["verl", "siirl"])
@pytest.mark.parametrize(
    ("words", "key", "note"),
    [
        ("data.train_batch_size=100 actor_rollout_ref.actor.ppo_mini_batch_size=30", ACTOR + "ppo_mini_batch_size", "100"),
        ("trainer.nnodes=1 trainer.n_gpus_per_node=6 actor_rollout_ref.actor.strategy=megatron "
         "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4", MEGATRON + "tensor_model_parallel_size", "6 devices"),
        ("algorithm.adv_estimator=remax", "algorithm.adv_estimator", "remax"),
        ("actor_rollout_ref.rollout.name=trtllm", ROLLOUT + "name", "trtllm"),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps=5", ACTOR + "optim.lr_warmup_steps", "share of all steps"),
        ("'data.train_files=[a.parquet, b.parquet]'", "data.train_files", "2 files"),
        ("actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora_rank", "LoRA"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=gspo", ACTOR + "policy_loss.loss_mode", "clipped"),
    ],
)  # fmt: skip
def test_what_cannot_be_converted_says_why(
    framework: Framework, words: str, key: str, note: str, tmp_path: Path
) -> None:
    conversion = convert_text(framework, tmp_path, f"python3 -m t {words}\n")
    assert key in conversion.unsupported()
    assert note in conversion[key].note


@pytest.mark.parametrize(
    ("words", "low", "high"),
    [
        ("clip_ratio=0.2", 0.2, None),
        ("clip_ratio_high=0.28", 0.2, 0.28),
        ("clip_ratio_low=0.1", 0.1, 0.2),
        ("clip_ratio=0.3 clip_ratio_low=0.1 clip_ratio_high=0.4", 0.1, 0.4),
    ],
)
def test_each_side_of_the_clip_range_has_its_own_default(
    words: str, low: float, high: float | None, tmp_path: Path
) -> None:
    arguments = " ".join(ACTOR + word for word in words.split())
    conversion = convert_text("verl", tmp_path, f"python3 -m t {arguments}")
    assert conversion.recipe.get("actor.eps_clip") == low
    assert conversion.recipe.get("actor.eps_clip_higher") == high
    assert conversion.unsupported() == set()


def test_a_clip_ratio_that_is_overruled_is_unsupported(tmp_path: Path) -> None:
    conversion = convert_text("verl", tmp_path, f"python3 -m t {ACTOR}clip_ratio=0.3")
    assert "clip_ratio_low and clip_ratio_high" in conversion[ACTOR + "clip_ratio"].note
    assert "actor.eps_clip" not in conversion.recipe


def test_siirls_megatron_decays_linearly_unless_told(tmp_path: Path) -> None:
    schedule = "actor.optimizer.lr_scheduler_type"
    assert convert_fixture("siirl", "siirl_megatron.sh").recipe[schedule] == "linear"
    words = f"{ACTOR}strategy=fsdp {ACTOR}optim.warmup_style=cosine"
    assert convert_text("siirl", tmp_path, f"python3 -m t {words}").recipe[schedule] == "cosine"


def test_the_references_options_do_not_change_the_actor(tmp_path: Path) -> None:
    override = "megatron.override_transformer_config.moe_router_dtype"
    words = f"actor_rollout_ref.ref.{override}=fp32 +actor_rollout_ref.ref.megatron.param_dtype=float32"
    conversion = convert_text("verl", tmp_path, f"python3 -m t {words}")
    assert conversion.unsupported() == set()
    assert "actor.dtype" not in conversion.recipe
    assert "actor.megatron.router_dtype" not in conversion.recipe
