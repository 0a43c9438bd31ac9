"""ROLL: roles with lists of devices, micro-batches in sequences, updates counted by accumulation."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest
from dialect_conversion import FIXTURES, convert_fixture, convert_text, convert_words

from fivefold.config.load import load_recipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.layout.placement import place
from fivefold_import.recipe import convert, import_recipe

TRAIN, INFER = "actor_train.", "actor_infer."
CONFIG = "strategy_args.strategy_config."
ACCUMULATION = TRAIN + "training_args.gradient_accumulation_steps"


def test_modules_that_are_recomputed_may_be_one_text() -> None:
    words = [f"{TRAIN}strategy_args.strategy_name=megatron_train", f"{TRAIN}{CONFIG}recompute_granularity=selective"]
    key = f"{TRAIN}{CONFIG}recompute_modules"
    for value in ("moe,layernorm", "[moe,layernorm]"):
        recipe = convert_words("roll", *words, f"{key}={value}").recipe
        assert recipe["actor.megatron.transformer.recompute_modules"] == ["moe", "layernorm"], value
    assert key in convert_words("roll", *words, f"{key}='moe,unheard_of'").unsupported()


def test_a_model_that_writes_judgements_is_no_reward_model_with_a_score_head() -> None:
    """Whatever its `model_type` says."""
    own = "rewards.judged."
    words = [
        f"{own}worker_cls=roll.pipeline.rlvr.rewards.llm_judge_reward_worker.LLMJudgeRewardWorker",
        f"{own}judge_model_type=inference",
        f"{own}model_args.model_name_or_path=some/judge",
        f"{own}model_args.model_type=trl",
        f"{own}generating_args.max_new_tokens=100",
    ]
    recipe = convert_words("roll", *words).recipe
    assert {key: value for key, value in recipe.items() if key.startswith("reward.")} == {
        "reward.fn": "judge",
        "reward.kwargs.max_tokens": 100,
        "reward.judge.path": "some/judge",
        "reward.judge.backend": "vllm:d*",
        "reward.judge.colocate": True,
    }
    conversion = convert_words("roll", *words[:1], *words[2:])
    assert not [key for key in conversion.recipe if key.startswith("reward.")]
    assert "a model that writes a judgement is reward.judge" in conversion[f"{own}model_args.model_name_or_path"].note


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
    assert conversion["val_sequence_length"].note == "without held-out prompts, nothing is evaluated"
    held_out = "sequence_length: 400\nval_sequence_length: 900\nvalidation: {data_args: {file_name: a.jsonl}}\n"
    assert convert_text("roll", tmp_path, text + held_out).recipe["evaluator.max_new_tokens"] == 800


def test_defaults_of_a_critic_are_not_unsupported(tmp_path: Path) -> None:
    conversion = convert_text("roll", tmp_path, "pretrain: some/model\nadv_estimator: gae\nresponse_length: 200\n")
    assert conversion.report.unsupported == []


def test_a_judge_in_processes_of_the_run_keeps_its_model_its_layout_and_its_lengths(tmp_path: Path) -> None:
    judge = """
      judge:
        worker_cls: roll.pipeline.rlvr.rewards.llm_judge_reward_worker.LLMJudgeRewardWorker
        judge_prompt: p
        judge_model_type: inference
        tag_included: [RLHF]
        model_args: {model_name_or_path: some/judge, dtype: bf16}
        generating_args: {max_new_tokens: 100, temperature: 0.6, top_p: 0.9}
        data_args: {template: qwen3}
        strategy_args: {strategy_name: sglang, strategy_config: {tensor_parallel_size: 2}}
        device_mapping: list(range(8,16))
        infer_batch_size: 4
    """
    roles = """
    actor_train: {strategy_args: {strategy_name: megatron_train}, device_mapping: "list(range(0,8))"}
    actor_infer: {strategy_args: {strategy_name: vllm}, device_mapping: "list(range(0,8))"}
    """
    text = dedent(roles) + f"pretrain: some/model\nrewards:{judge}"
    conversion = convert_text("roll", tmp_path, text)
    keys = {entry.key for entry in conversion.report.entries if entry.key.startswith("rewards.judge.")}
    assert len(keys) == 14
    assert keys & conversion.unsupported() == {"rewards.judge.judge_prompt"}
    assert {key: value for key, value in conversion.recipe.items() if key.startswith("reward.")} == {
        "reward.fn": "judge",
        "reward.kwargs.max_tokens": 100,
        "reward.kwargs.temperature": 0.6,
        "reward.kwargs.top_p": 0.9,
        "reward.judge.path": "some/judge",
        "reward.judge.dtype": "bfloat16",
        "reward.judge.backend": "sglang:d4t2",
        "reward.judge.device_mapping": "8-15",
    }
    plain = convert_text("roll", tmp_path, text.replace("        judge_prompt: p\n", ""))
    assert any("write the question as reward.kwargs.template" in note for note in plain.report.notes)
    # A run hosts one judge.
    second = judge.replace("judge:\n", "other:\n", 1).replace("some/judge", "another/judge")
    both = convert_text("roll", tmp_path, f"{text}{second}")
    assert both.recipe["reward.judge.path"] == "some/judge"
    assert "rewards.other.model_args.model_name_or_path" in both.unsupported()


def test_a_reward_from_another_model_is_unsupported_with_all_its_keys(tmp_path: Path) -> None:
    # A classifier on its own devices is a model as well.
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


def test_keys_are_reported_by_the_names_that_the_source_has() -> None:
    words = ["student_train.model_args.dtype=bf16", "student_train.training_args.learning_rate=1.7e-5"]
    conversion = convert_words("roll", *words)
    assert conversion["student_train.training_args.learning_rate"].to == "actor.optimizer.lr"
    written = [entry.key for entry in conversion.report.entries if not entry.is_default]
    assert sorted(written) == ["student_*", *(word.partition("=")[0] for word in words)]


def test_modules_that_are_never_trained_may_be_frozen() -> None:
    key = "actor_train.model_args.freeze_module_prefix"
    for value, outcome in (
        ("vision_model", "implied"),
        ("vision_model,audio_model,talker,code2wav", "implied"),
        ("vision_model.blocks,vision_model.patch_embed", "unsupported"),  # all but what joins tower and text
        ("embedding", "unsupported"),
    ):
        assert convert_words("roll", f"{key}={value}")[key].outcome == outcome, value


def test_a_script_of_roll_names_its_yaml_file(tmp_path: Path) -> None:
    folder = tmp_path / "examples" / "moe"
    folder.mkdir(parents=True)
    (folder / "rlvr_config.yaml").write_text("exp_name: named\nrollout_batch_size: 16\n")
    script = folder / "run.sh"
    command = "CONFIG_PATH=$(basename $(dirname $0))\npython examples/start_{}_pipeline.py --config_path $CONFIG_PATH "
    for name in ("--config_name rlvr_config", "\\\n  --config_name=rlvr_config.yaml"):
        script.write_text(command.format("rlvr") + name + "\n")
        recipe, report = convert("roll", [script], ["rollout_batch_size=32"], {})
        assert (recipe["experiment_name"], recipe["train_dataset"]["batch_size"]) == ("named", 32)
        assert report.problems == ()
    script.write_text(command.format("rlvr_rollout") + "--config_name rlvr_config\n")
    assert "starts start_rlvr_rollout_pipeline.py" in convert("roll", [script], [], {})[1].problems[0]
    script.write_text("python examples/start_rlvr_pipeline.py --config_path moe --config_name other\n")
    with pytest.raises(ValueError, match=r"--config_name other is not there"):
        convert("roll", [script], [], {})
    (tmp_path / "examples" / "elsewhere").mkdir()
    far = tmp_path / "examples" / "elsewhere" / "run.sh"
    far.write_text("python examples/start_rlvr_pipeline.py --config_path moe --config_name rlvr_config\n")
    assert convert("roll", [far], [], {})[0]["experiment_name"] == "named"
