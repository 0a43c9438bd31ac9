"""ROLL: roles with lists of devices, micro-batches in sequences, updates counted by accumulation."""

from __future__ import annotations

from pathlib import Path

from dialect_conversion import FIXTURES, convert_fixture, convert_text, convert_words

from fivefold.config.load import load_recipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.layout.placement import place
from fivefold_import.recipe import import_recipe

TRAIN, INFER = "actor_train.", "actor_infer."
CONFIG = "strategy_args.strategy_config."
ACCUMULATION = TRAIN + "training_args.gradient_accumulation_steps"


def test_blocks_of_a_manual_are_laid_out_and_leave_the_rest_to_the_user() -> None:
    conversion = convert_fixture("roll", "roll_megatron.yaml")
    assert conversion.recipe == {
        "experiment_name": "roll_megatron",  # the file's name
        "seed": 42,
        "cluster.n_nodes": 4,
        "scheduler.type": "ray",
        "scheduler.timeout_s": 3600.0,  # this and other values that the manual leaves out are ROLL's defaults
        "total_train_steps": 500,
        "recover.freq_steps": 50,
        "recover.freq_secs": None,
        "actor.path": "???",
        # 32 devices in stages of t2: 8 replicas of 2 stages, each in 8 chunks; whole experts, 4 ways
        "actor.backend": "megatron:d8p2v8t2e4",
        "actor.dtype": "bfloat16",
        "actor.megatron.token_dispatcher": "alltoall",
        "actor.megatron.recompute": "selective",
        "actor.optimizer.lr": 1e-6,
        "actor.optimizer.weight_decay": 0.0,
        "actor.optimizer.lr_scheduler_type": "linear",
        "actor.optimizer.warmup_steps": 20,
        "actor.loss_aggregation": "sequence_mean",
        "actor.advantage": "gae",
        "actor.whiten_advantages": False,
        "critic.path": "${actor.path}",
        "critic.backend": "megatron:d8p2v8t2e4",  # the manual has no block for it: it is laid out as the actor
        "critic.dtype": "bfloat16",
        "critic.megatron.recompute": "selective",
        "critic.optimizer.lr": 5e-5,
        "critic.optimizer.weight_decay": 0.0,
        "critic.optimizer.lr_scheduler_type": "linear",
        "critic.eps_clip": None,
        "rollout.backend": "transformers:d*",
        "rollout.colocate": True,
        "rollout.max_batch_size": 128,
        "gconfig.n_samples": 1,
        "train_dataset.path": "???",
        "train_dataset.batch_size": 128,
    }
    assert conversion.report.to_give == ("actor.path", "train_dataset.path")
    training = TRAIN + "training_args."
    # 128 prompts do not divide into updates of 32 * 8 replicas, and responses have no longest length.
    assert conversion.unsupported() == {
        ACCUMULATION,
        training + "per_device_train_batch_size",
        TRAIN + "infer_batch_size",
    }


def test_grpo_on_a_mixture_of_experts() -> None:
    conversion = convert_fixture("roll", "roll_grpo_moe.yaml")
    assert conversion.recipe == {
        "experiment_name": "moe-run-7",
        "seed": 11,
        "cluster.n_nodes": 4,
        "scheduler.type": "ray",
        "cluster.n_gpus_per_node": 8,
        "cluster.fileroot": "./out",
        "scheduler.timeout_s": 3600.0,  # ROLL's default, as the two marked below
        "total_train_steps": 200,
        "stats.trackers": ["tensorboard"],
        "recover.freq_steps": 50,
        "recover.freq_secs": None,
        "actor.path": "Qwen/Qwen3-30B-A3B",
        "actor.backend": "megatron:d2p2v6c4e4",  # 16 devices / (p2 * c4)
        "actor.dtype": "bfloat16",
        "actor.mb_spec.max_tokens_per_mb": 1024 + 3072,
        "actor.mb_spec.max_tokens_per_infer_mb": 2 * (1024 + 3072),
        "ref.mb_spec.max_tokens_per_mb": 2 * (1024 + 3072),
        "actor.megatron.token_dispatcher": "alltoall",
        "actor.megatron.recompute": "full",
        "actor.megatron.transformer.moe_aux_loss_coeff": 0.001,  # the model's own config.json has it
        "actor.optimizer.lr": 3e-6,
        "actor.optimizer.weight_decay": 0.1,
        "actor.optimizer.lr_scheduler_type": "linear",  # ROLL's default
        "actor.optimizer.warmup_steps": 8,
        "actor.ppo_epochs": 1,
        "actor.ppo_n_minibatches": 64 * 8 // (1 * 64 * 2),
        "actor.eps_clip": 0.25,
        "actor.c_clip": 1 + 2 * 0.25,
        "actor.loss_aggregation": "sequence_sum",
        "actor.kl_in": "loss",
        "actor.kl_ctl": 0.002,
        "actor.kl_estimator": "k3",
        "actor.reward_norm.mean_level": "group",
        "actor.reward_norm.std_level": "group",
        "actor.reward_clip": 5.0,
        "ref.backend": "megatron:d16e4",
        "rollout.backend": "vllm:d8t2",
        "rollout.colocate": False,
        "rollout.max_batch_size": 128,  # ROLL's default
        "rollout.memory_fraction": 0.6,
        "gconfig.n_samples": 8,
        "gconfig.max_new_tokens": 3072,
        "gconfig.temperature": 0.95,
        "gconfig.top_p": 0.95,
        "gconfig.top_k": 100,
        "train_dataset.path": "data/sums.jsonl",
        "train_dataset.batch_size": 64,
        "train_dataset.max_length": 1024,
        "train_dataset.prompt_key": "messages",
        "train_dataset.answer_key": "ground_truth",
        "valid_dataset.path": "data/held-out.jsonl",
        "valid_dataset.max_length": 1024,
        "valid_dataset.prompt_key": "messages",
        "valid_dataset.answer_key": "ground_truth",
        "reward.fn": "math",
        "evaluator.freq_steps": 25,
        "evaluator.n_samples": 2,
        "evaluator.greedy": False,
        "evaluator.temperature": 0.7,
    }
    assert conversion.unsupported() == {
        "system_envs.SOME_SWITCH",
        "advantage_clip",
        "validation.generating_args.top_p",
        "validation.generating_args.top_k",
    }


def test_ppo_with_a_critic_on_deepspeed_runs_on_fsdp() -> None:
    conversion = convert_fixture("roll", "roll_ppo_deepspeed.yaml")
    assert conversion.recipe == {
        "experiment_name": "ppo",
        "seed": 42,
        "cluster.n_nodes": 1,
        "scheduler.timeout_s": 3600.0,
        "total_train_steps": 100,
        "recover.freq_steps": 50,
        "recover.freq_secs": None,
        "actor.path": "Qwen/Qwen2.5-0.5B-Instruct",
        "actor.backend": "fsdp:d4",
        "actor.mb_spec.max_tokens_per_mb": 2 * 1536,
        "actor.fsdp.recompute": "full",  # ROLL's default
        "actor.optimizer.lr": 1e-6,
        "actor.optimizer.weight_decay": 0.0,  # this and the next are ROLL's defaults
        "actor.optimizer.lr_scheduler_type": "linear",
        "actor.loss_aggregation": "sequence_mean",
        "actor.kl_target": 0.05,
        "actor.kl_in": "reward",
        "actor.kl_ctl": 0.1,
        "actor.kl_estimator": "k2",
        "actor.advantage": "gae",
        "actor.discount": 1.0,
        "actor.gae_lambda": 0.95,
        "actor.whiten_advantages": False,  # ROLL's default
        "critic.path": "Qwen/Qwen2.5-0.5B-Instruct",
        "critic.backend": "fsdp:d4",
        "critic.device_mapping": "0-3",
        "critic.dtype": "bfloat16",
        "critic.mb_spec.max_tokens_per_mb": 2 * 1536,
        "critic.fsdp.recompute": "full",
        "critic.optimizer.lr": 1e-5,
        "critic.optimizer.weight_decay": 0.0,
        "critic.optimizer.lr_scheduler_type": "linear",
        "critic.eps_clip": None,
        "rollout.backend": "transformers:d2",
        "rollout.max_batch_size": 128,
        "actor.device_mapping": "0-3",
        "rollout.device_mapping": "0-1",  # both take turns on the first two devices
        "gconfig.n_samples": 1,
        "gconfig.max_new_tokens": 1536 - 512,
        "train_dataset.path": "data/train.jsonl",
        "train_dataset.batch_size": 32,
        "train_dataset.max_length": 512,
        "train_dataset.prompt_key": "question",
        "train_dataset.answer_key": "ground_truth",
    }
    assert conversion.unsupported() == {
        ACCUMULATION,
        TRAIN + CONFIG + "zero_optimization.stage",
    }


def test_lists_of_devices_say_which_roles_share() -> None:
    """The actor has devices 0 to 15."""
    cases = [
        ("list(range(0,16))", True, "vllm:d8t2"),
        ("[16, 17]", False, "vllm:d1t2"),
        ("16-19", False, "vllm:d2t2"),
    ]
    for devices, colocate, backend in cases:
        conversion = convert_fixture("roll", "roll_grpo_moe.yaml", overrides=[f"{INFER}device_mapping='{devices}'"])
        assert conversion.recipe["rollout.colocate"] is colocate, devices
        assert conversion.recipe["rollout.backend"] == backend, devices
        assert INFER + "device_mapping" not in conversion.unsupported(), devices


def test_lists_that_overlap_in_part_become_lists_of_the_recipe(tmp_path: Path) -> None:
    """The actor has devices 0 to 15, and is laid out as p2 c4."""
    output = tmp_path / "recipe.yaml"
    cases: list[tuple[str, str, dict[str, list[int]]]] = [
        ("list(range(8,24))", "0-15", {"rollout": [*range(8, 24)], "actor": [*range(16)], "ref": [*range(16)]}),
        ("list(range(0,8))", "0-15", {"rollout": [*range(8)], "actor": [*range(16)], "ref": [*range(16)]}),
        ("[0, 1, 20, 21]", "8-15", {"rollout": [0, 1, 20, 21], "actor": [*range(16)], "ref": [*range(8, 16)]}),
        ("0-15", "16-31", {"rollout": [*range(16)], "actor": [*range(16)], "ref": [*range(16, 32)]}),
    ]
    for rollout, reference, expected in cases:
        words = [f"{INFER}device_mapping='{rollout}'", f"reference.device_mapping='{reference}'"]
        source = FIXTURES / "roll_grpo_moe.yaml"
        report = import_recipe("roll", [source], words, output, overwrite=True, environment={})
        assert report.problems == (), words
        assert not [entry for entry in report.unsupported if "device_mapping" in entry.key], words
        placement = place(load_recipe(output, [], TrainRecipe))
        devices = {placed.role: [8 * node + local for node, local in placed.devices] for placed in placement.roles}
        assert devices == expected, words


def test_layouts_that_cannot_be_are_unsupported() -> None:
    devices, config = TRAIN + "device_mapping", TRAIN + CONFIG
    cases = {
        f"{devices}=range(0,16": {devices},
        # 12 devices hold no whole replicas of p2 * c4.
        f"{devices}='list(range(0,12))'": {config + "context_parallel_size"},
        f"{config}expert_model_parallel_size=3": {config + "expert_model_parallel_size"},
        f"{config}tensor_model_parallel_size=two": {config + "tensor_model_parallel_size"},
    }
    for override, unsupported in cases.items():
        conversion = convert_fixture("roll", "roll_grpo_moe.yaml", overrides=[override])
        assert unsupported <= conversion.unsupported(), override
        assert conversion.recipe["actor.backend"].startswith("megatron:"), override


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
    assert "64 prompts of 8 responses do not divide" in conversion[ACCUMULATION].note
    assert ACCUMULATION in conversion.unsupported()


def test_the_token_budget_of_packing_overrides_the_micro_batch(tmp_path: Path) -> None:
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


def test_the_length_of_responses_is_the_one_that_roll_would_use(tmp_path: Path) -> None:
    text = "pretrain: some/model\nprompt_length: 100\nactor_infer: {generating_args: {max_new_tokens: 7}}\n"
    assert convert_text("roll", tmp_path, text).recipe["gconfig.max_new_tokens"] == 7
    text += "response_length: 200\n"
    assert convert_text("roll", tmp_path, text).recipe["gconfig.max_new_tokens"] == 200
    conversion = convert_text("roll", tmp_path, text + "sequence_length: 400\nval_sequence_length: 900\n")
    assert conversion.recipe["gconfig.max_new_tokens"] == 300
    assert conversion["response_length"].note == "sequence_length overrides it"
    assert conversion["val_sequence_length"].note == "held-out responses have gconfig.max_new_tokens=300 and not 800"


def test_defaults_of_a_critic_are_not_unsupported(tmp_path: Path) -> None:
    conversion = convert_text("roll", tmp_path, "pretrain: some/model\nadv_estimator: gae\nresponse_length: 200\n")
    assert conversion.report.unsupported == []


def test_rewards_of_several_domains_become_rewards_with_data_sources(tmp_path: Path) -> None:
    text = """
    pretrain: some/model
    rewards:
      sums: {worker_cls: a.b.MathRuleRewardWorker, world_size: 2, tag_included: [gsm8k, aime]}
      code: {worker_cls: a.b.CodeSandboxRewardWorker, world_size: 2, use_local: true, tag_included: [kod]}
      helpful:
        worker_cls: a.b.LLMJudgeRewardWorker
        judge_model_type: api
        judge_api_url: http://judge:8000/v1/chat/completions
        judge_model_name: some/judge
        judge_prompt: p
        tag_included: [RLHF]
    """
    conversion = convert_text("roll", tmp_path, text)
    assert {key: value for key, value in conversion.recipe.items() if key.startswith("reward.")} == {
        "reward.rewards.sums.fn": "math",
        "reward.rewards.sums.data_sources": ["gsm8k", "aime"],
        "reward.rewards.helpful.fn": "judge",
        "reward.rewards.helpful.kwargs.base_url": "http://judge:8000/v1",
        "reward.rewards.helpful.kwargs.model": "some/judge",
        "reward.rewards.helpful.data_sources": ["RLHF"],
    }
    of_code = {f"rewards.code.{key}" for key in ("worker_cls", "use_local", "tag_included")}
    assert conversion.unsupported() == {*of_code, "rewards.helpful.judge_prompt"}
    assert "reward.rewards.code.fn=code" in conversion["rewards.code.worker_cls"].note
    filtered = (
        "rewards: {sums: {worker_cls: a.MathRuleRewardWorker, response_length_penalty_coef: 0.1, "
        "query_filter_config: {type: mean_filter, filter_args: {threshold_up: 0.9}}}}\n"
    )
    conversion = convert_text("roll", tmp_path, f"pretrain: some/model\n{filtered}")
    assert conversion.recipe["reward.fn"] == "math"
    assert conversion.unsupported() == {
        "rewards.sums.response_length_penalty_coef",
        "rewards.sums.query_filter_config.type",
        "rewards.sums.query_filter_config.filter_args.threshold_up",
    }


def test_a_reward_from_a_model_is_unsupported_with_all_its_keys(tmp_path: Path) -> None:
    judge = """
      judge:
        worker_cls: roll.pipeline.rlvr.rewards.llm_judge_reward_worker.LLMJudgeRewardWorker
        judge_prompt: p
        judge_model_type: inference
        tag_included: [RLHF]
        model_args: {model_name_or_path: some/judge, dtype: bf16}
        generating_args: {max_new_tokens: 100}
        data_args: {template: qwen3}
        strategy_args: {strategy_name: hf_infer}
        device_mapping: list(range(8,16))
        infer_batch_size: 4
    """
    conversion = convert_text("roll", tmp_path, f"pretrain: some/model\nrewards:{judge}")
    keys = {entry.key for entry in conversion.report.entries if entry.key.startswith("rewards.judge.")}
    assert len(keys) == 11
    assert keys <= conversion.unsupported()
    assert "reward.fn=judge" in conversion["rewards.judge.model_args.model_name_or_path"].note
    # A classifier on devices of its own is a model as well.
    placed = "rewards: {score: {worker_cls: my.Worker, world_size: 2, device_mapping: '0-1'}}\n"
    conversion = convert_text("roll", tmp_path, placed)
    assert {"rewards.score.world_size", "rewards.score.device_mapping"} <= conversion.unsupported()


def test_normalisation_of_rewards_and_advantages() -> None:
    mean, std = "actor.reward_norm.mean_level", "actor.reward_norm.std_level"
    group = ["adv_estimator=reinforce", "num_return_sequences_in_group=4"]
    for words, levels in (
        ([], ("none", "none")),
        (["norm_mean_type=group", "norm_std_type=batch"], ("group", "batch")),
        (["reward_norm=group", "reward_shift=true"], ("group", "none")),
        (["reward_norm=group"], ("group", "group")),
        (["whiten_advantages=true"], ("none", "none")),
    ):
        conversion = convert_words("roll", *group, *words)
        assert (conversion.recipe[mean], conversion.recipe[std]) == levels, words
        assert conversion.unsupported() == set(), words
    twice = convert_words("roll", *group, "norm_mean_type=group", "whiten_advantages=true")
    assert (twice.recipe[mean], twice.recipe["actor.whiten_advantages"]) == ("group", True)


def test_a_clip_range_has_one_ratio_or_two() -> None:
    for words, low, high in (
        (["pg_clip=0.3"], 0.3, None),
        (["pg_clip=0.3", "pg_clip_low=0.1", "pg_clip_high=0.4"], 0.3, None),
        (["pg_clip=0.3", "pg_clip_low=0.1", "pg_clip_high=0.4", "use_pg_clip_range=true"], 0.1, 0.4),
    ):
        recipe = convert_words("roll", *words).recipe
        assert (recipe["actor.eps_clip"], recipe.get("actor.eps_clip_higher")) == (low, high), words
