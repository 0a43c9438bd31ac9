"""NeMo-RL: files that build on others, and what its sections become."""

from __future__ import annotations

from pathlib import Path

import pytest
from dialect_conversion import convert_files, convert_fixture, convert_text, convert_words

BASE = "nemo_rl_base.yaml"


def write(folder: Path, **files: str) -> dict[str, Path]:
    paths = {name: folder / f"{name}.yaml" for name in files}
    for name, text in files.items():
        paths[name].write_text(text, encoding="utf-8")
    return paths


def test_files_in_defaults_are_read_first_and_sections_are_merged(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    write(tmp_path / "below", root="policy: {model_name: a/b, optimizer: {kwargs: {lr: 1.0e-6, eps: 1e-5}}}\n")
    files = write(
        tmp_path,
        rates="defaults: below/root.yaml\npolicy: {optimizer: {kwargs: {lr: 2.0e-6}}}\ngrpo: {seed: 1}\n",
        seeds="grpo: {seed: 2, num_prompts_per_step: 16}\n",
        run="defaults: [rates.yaml, ./seeds.yaml]\ncluster: {num_nodes: 2, gpus_per_node: 4}\n",
    )
    recipe = convert_files("nemo_rl", [files["run"]], [], {}).recipe
    assert (recipe["actor.path"], recipe["actor.optimizer.lr"], recipe["actor.optimizer.eps"]) == ("a/b", 2e-6, 1e-5)
    assert (recipe["seed"], recipe["train_dataset.batch_size"], recipe["cluster.n_nodes"]) == (2, 16, 2)


def test_a_value_and_a_marked_section_replace_what_they_build_on(tmp_path: Path) -> None:
    base = "policy: {model_name: a/b, optimizer: {kwargs: {lr: 2.0e-6}}}\nloss_fn: {ratio_clip_max: 0.3, ratio_clip_c: 3}\n"
    files = write(
        tmp_path,
        base=base,
        run="defaults: base.yaml\npolicy: {optimizer: null}\nloss_fn: {_override_: true, ratio_clip_max: 0.4}\n",
    )
    conversion = convert_files("nemo_rl", [files["run"]], [], {})
    assert "actor.optimizer.lr" not in conversion.recipe
    assert conversion.recipe["actor.eps_clip_higher"] == 0.4
    assert "actor.c_clip" not in conversion.recipe


def test_a_file_that_is_not_there_is_a_problem_and_a_loop_is_an_error(tmp_path: Path) -> None:
    files = write(tmp_path, run="defaults: gone.yaml\ngrpo: {seed: 3}\n", loop="defaults: loop.yaml\n")
    (problem,) = convert_files("nemo_rl", [files["run"]], [], {}).report.problems
    assert "gone.yaml" in problem
    with pytest.raises(ValueError, match=r"loop\.yaml: its `defaults` lead to more than 20 files"):
        convert_files("nemo_rl", [files["loop"]], [], {})


def test_a_script_reads_the_configuration_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "examples" / "configs").mkdir(parents=True)
    write(
        tmp_path / "examples" / "configs", mine="grpo: {seed: 3, num_prompts_per_step: 8}\npolicy: {model_name: a/b}\n"
    )
    (tmp_path / "tests").mkdir()
    script = tmp_path / "tests" / "run.sh"
    script.write_text(
        "STEPS=30\nuv run examples/run_grpo.py --config examples/configs/mine.yaml grpo.max_num_steps=$STEPS grpo.seed=4\n"
    )
    conversion = convert_files("nemo_rl", [script], [], {})
    recipe = conversion.recipe
    assert (recipe["seed"], recipe["train_dataset.batch_size"], recipe["total_train_steps"]) == (4, 8, 30)
    assert conversion.report.problems == ()
    script.write_text("uv run examples/run_grpo.py --config examples/configs/none.yaml grpo.seed=4\n")
    (problem,) = convert_files("nemo_rl", [script], [], {}).report.problems
    assert "none.yaml was not read" in problem


@pytest.mark.parametrize(
    ("words", "advantage", "levels"),
    [
        ([], "grpo_leave_one_out", None),
        (["grpo.normalize_rewards=false"], "rloo", None),
        (["grpo.use_leave_one_out_baseline=false"], None, "group"),
        (["grpo.use_leave_one_out_baseline=false", "grpo.normalize_rewards=false"], None, "none"),
        (["grpo.adv_estimator.name=reinforce_plus_plus"], "reinforce_pp_baseline", None),
        (
            ["grpo.adv_estimator.name=reinforce_plus_plus", "grpo.adv_estimator.minus_baseline=false"],
            "reinforce_pp",
            None,
        ),
    ],
)
def test_estimators_become_advantages(words: list[str], advantage: str | None, levels: str | None) -> None:
    recipe = convert_fixture("nemo_rl", BASE, words).recipe
    assert recipe.get("actor.advantage") == advantage
    assert recipe.get("actor.reward_norm.std_level") == levels


def test_estimators_that_are_not_offered_are_unsupported() -> None:
    assert "grpo.adv_estimator.name" in convert_fixture("nemo_rl", BASE, ["grpo.adv_estimator.name=opd"]).unsupported()


@pytest.mark.parametrize(
    ("words", "loss", "aggregation"),
    [
        ([], None, "token_mean"),
        (["loss_fn.use_cispo=true"], "cispo", "token_mean"),
        (["loss_fn.force_on_policy_ratio=true"], "reinforce", "token_mean"),
        (["loss_fn.disable_ppo_ratio=true"], "reinforce", "token_mean"),
        (["loss_fn.sequence_level_importance_ratios=true", "loss_fn.token_level_loss=false"], "gspo", "sequence_mean"),
    ],
)
def test_switches_choose_the_loss(words: list[str], loss: str | None, aggregation: str) -> None:
    conversion = convert_fixture("nemo_rl", BASE, words)
    assert conversion.recipe.get("actor.loss") == loss
    assert conversion.recipe["actor.loss_aggregation"] == aggregation
    assert ("actor.eps_clip" in conversion.recipe) == (loss != "reinforce")


CORRECTS = ["loss_fn.use_importance_sampling_correction=true"]
BOUNDS = ["loss_fn.truncated_importance_sampling_ratio=5", "loss_fn.truncated_importance_sampling_ratio_min=0.5"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], {"method": "none"}),
        (CORRECTS, {"method": "custom", "weight": "token"}),
        ([*CORRECTS, BOUNDS[0]], {"method": "custom", "weight": "token", "weight_cap": 5.0}),
        (
            [*CORRECTS, *BOUNDS, "loss_fn.truncated_importance_sampling_type=icepop"],
            {"method": "custom", "weight": "token", "mask": "token", "mask_above": 5.0, "mask_below": 0.5},
        ),
        (
            [*CORRECTS, *BOUNDS, "loss_fn.truncated_importance_sampling_type=seq-mask-tis"],
            {"method": "custom", "weight": "token", "mask": "geometric", "mask_above": 5.0, "mask_below": 0.5},
        ),
        (
            [*CORRECTS, "loss_fn.sequence_level_importance_ratios=true", "loss_fn.token_level_loss=false"],
            {"method": "custom", "weight": "sequence"},
        ),
    ],
)
def test_corrections_are_what_the_source_says_and_off_otherwise(words: list[str], expected: dict[str, object]) -> None:
    recipe = convert_fixture("nemo_rl", BASE, words).recipe
    section = "actor.rollout_correction."
    assert {key.removeprefix(section): value for key, value in recipe.items() if key.startswith(section)} == expected


def test_a_kl_term_has_the_gradient_of_its_samples_unless_it_is_in_the_reward() -> None:
    recipe = convert_fixture("nemo_rl", BASE).recipe
    assert (recipe["actor.kl_ctl"], recipe["actor.kl_unbiased"]) == (0.01, True)
    plus = ["grpo.adv_estimator.name=reinforce_plus_plus", "loss_fn.use_kl_in_reward=true"]
    recipe = convert_fixture("nemo_rl", BASE, plus).recipe
    assert recipe["actor.kl_in"] == "reward"
    assert "actor.kl_unbiased" not in recipe
    # GRPO's estimator reads no KL term, so that the switch takes it out of the loss and puts it nowhere.
    assert "actor.kl_ctl" not in convert_fixture("nemo_rl", BASE, plus[1:]).recipe


def test_rewards_are_scaled_before_the_penalty_as_there() -> None:
    words = ["grpo.reward_scaling.enabled=true", "grpo.reward_shaping.enabled=true"]
    recipe = convert_fixture("nemo_rl", BASE, words).recipe
    scale, bias = recipe["actor.reward_scaling"], recipe["actor.reward_bias"]
    assert [(reward + bias) * scale for reward in (0.0, 1.0)] == [-1.0, 1.0]
    # There: 2 r - 1 - penalty. Here: 2 (r - penalty') - 1.
    assert scale * recipe["actor.overlong_penalty_factor"] == 1.0
    limit = "grpo.reward_shaping.max_response_length"
    for value in (100_000, 0):
        assert limit in convert_fixture("nemo_rl", BASE, [*words, f"{limit}={value}"]).unsupported()


def test_a_penalty_that_begins_elsewhere_is_the_same_for_every_length() -> None:
    at, most, buffer, penalty = "grpo.reward_shaping.", 4000, 500, 0.5
    for limit in (3000, 4200):
        words = [f"policy.generation.max_new_tokens={most}", f"{at}enabled=true", f"{at}max_response_length={limit}"]
        words += [f"{at}overlong_buffer_length={buffer}", f"{at}overlong_buffer_penalty={penalty}"]
        conversion = convert_words("nemo_rl", "grpo.num_prompts_per_step=4", *words)
        assert conversion.unsupported() == set()
        tokens, factor = (conversion.recipe[f"actor.overlong_{name}"] for name in ("tokens", "penalty_factor"))
        for length in (100, 2400, 2600, 3600, 3900, most):
            theirs = max(0.0, (length - (limit - buffer)) / buffer * penalty)
            assert max(0.0, (length - (most - tokens)) / tokens * factor) == pytest.approx(theirs)


@pytest.mark.parametrize(("samples", "expected"), [(256, 1), (128, 2), (8, 32), (96, None), (4, None)])
def test_updates_follow_from_samples(samples: int, expected: int | None) -> None:
    conversion = convert_fixture("nemo_rl", BASE, [f"policy.train_global_batch_size={samples}"])
    assert conversion.recipe.get("actor.ppo_n_minibatches") == expected
    assert ("policy.train_global_batch_size" in conversion.unsupported()) == (expected is None)


def test_a_warm_up_begins_at_its_share_of_the_rate() -> None:
    start = "policy.scheduler.0.kwargs.start_factor"
    assert convert_fixture("nemo_rl", BASE).recipe["actor.optimizer.warmup_start_ratio"] == 0.1
    assert convert_fixture("nemo_rl", BASE, [f"{start}=0"])[start].outcome == "implied"
    none = ["policy.scheduler.0.kwargs.total_iters=0", "policy.scheduler.2.milestones=[0]"]
    assert convert_fixture("nemo_rl", BASE, none)[start].outcome == "implied"


def test_the_rollout_has_its_own_devices_if_it_is_not_colocated() -> None:
    apart = ["policy.generation.colocated.enabled=false", "policy.generation.colocated.resources.gpus_per_node=2"]
    recipe = convert_fixture("nemo_rl", BASE, apart).recipe
    assert (recipe["actor.backend"], recipe["rollout.backend"]) == ("fsdp:d3t2", "vllm:d1t2")
    assert recipe["rollout.colocate"] is False
    assert recipe["rollout.memory_fraction"] == 0.55


def test_a_dense_model_has_no_options_of_experts() -> None:
    conversion = convert_fixture("nemo_rl", "nemo_rl_moe.yaml", ["policy.model_name=Qwen/Qwen3-1.7B"])
    for name in ("moe_router_dtype", "freeze_moe_router", "expert_model_parallel_size"):
        assert conversion[f"policy.megatron_cfg.{name}"].outcome == "implied"
    assert "actor.freeze" not in conversion.recipe


def test_a_null_norm_switches_clipping_off() -> None:
    assert convert_fixture("nemo_rl", "nemo_rl_ppo.yaml").recipe["critic.optimizer.gradient_clipping"] == 0.0


def test_options_of_vllm_become_arguments_of_its_command_line() -> None:
    conversion = convert_fixture("nemo_rl", BASE, ["policy.generation.vllm_kwargs.max_num_seqs=64"])
    assert conversion.recipe["rollout.max_batch_size"] == 64
    assert "--no-enable-chunked-prefill" in conversion.recipe["rollout.server_args"]


def test_agents_of_nemo_gym_are_left_to_the_user(tmp_path: Path) -> None:
    text = (
        "grpo: {num_prompts_per_step: 4}\ndata: {train: {data_path: a.jsonl}, default: {dataset_name: NemoGymDataset, "
    )
    text += "env_name: nemo_gym}}\nenv: {nemo_gym: {config_paths: [a.yaml], x: {y: 1}}}\npolicy: {max_total_sequence_length: 9}\n"
    conversion = convert_text("nemo_rl", tmp_path, text)
    assert conversion.recipe["environment.agent"] == "???"
    assert conversion.recipe["environment.max_length"] == 9
    assert {"env.nemo_gym.config_paths", "env.nemo_gym.x.y"} <= conversion.unsupported()


def test_steps_end_a_run_without_epochs() -> None:
    words = ["grpo.num_prompts_per_step=4", "grpo.max_num_epochs=-1", "grpo.max_num_steps=100000"]
    conversion = convert_words("nemo_rl", *words)
    assert conversion.recipe["total_train_steps"] == 100000
    assert conversion.unsupported() == set()


def test_programs_are_told_by_their_sections() -> None:
    assert convert_fixture("nemo_rl", "nemo_rl_dpo.yaml").report.command == "fivefold dpo"
    assert convert_fixture("nemo_rl", "nemo_rl_sft.yaml").report.command == "fivefold sft"
    assert convert_words("nemo_rl", "rm.max_num_epochs=2", "policy.model_name=a/b").report.command == "fivefold rm"
    with pytest.raises(ValueError, match="evaluation or generation without training"):
        convert_words("nemo_rl", "eval.metric=pass@k", "generation.model_name=a/b")


def test_a_run_without_checkpoints_writes_none() -> None:
    conversion = convert_fixture("nemo_rl", BASE, ["checkpointing.enabled=false"])
    assert conversion.recipe["recover.mode"] == "disabled"
    assert "recover.freq_steps" not in conversion.recipe


def test_training_ahead_is_by_one_step_unless_the_source_says_otherwise() -> None:
    words = ["grpo.num_prompts_per_step=8", "grpo.async_grpo.enabled=true"]
    assert convert_words("nemo_rl", *words).recipe["rollout.max_head_offpolicyness"] == 1
    older = convert_words("nemo_rl", *words, "grpo.async_grpo.max_trajectory_age_steps=3").recipe
    assert older["rollout.max_head_offpolicyness"] == 3
    assert "rollout.max_head_offpolicyness" not in convert_words("nemo_rl", words[0]).recipe


def test_texts_around_prompts_come_from_the_files_that_hold_them(tmp_path: Path) -> None:
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "cot.txt").write_text("Solve {} in {{}}.")
    (tmp_path / "prompts" / "system.txt").write_text("Be brief.")
    (tmp_path / "prompts" / "two.txt").write_text("{} and {}")
    data = (
        "policy: {model_name: a/b}\ndata: {train: {dataset_name: gsm8k}, validation: {dataset_name: gsm8k, split: test}, "
        "default: {prompt_file: prompts/%s, system_prompt_file: prompts/%s}}\n"
    )
    files = write(tmp_path, run=data % ("cot.txt", "system.txt"), odd=data % ("two.txt", "gone.txt"))
    conversion = convert_files("nemo_rl", [files["run"]], [], {})
    for section in ("train_dataset", "valid_dataset"):
        assert conversion.recipe[f"{section}.prompt_template"] == "Solve {prompt} in {}."
        assert conversion.recipe[f"{section}.system_prompt"] == "Be brief."
    odd = convert_files("nemo_rl", [files["odd"]], [], {})
    assert {"data.default.prompt_file", "data.default.system_prompt_file"} <= odd.unsupported()
    assert "was not found" in odd["data.default.system_prompt_file"].note


def test_rows_are_held_out_by_chance_where_no_file_has_them(tmp_path: Path) -> None:
    train = "policy: {model_name: a/b}\ndata: {train: {dataset_name: %s, split_validation_size: 0.05}%s}\n"
    files = write(
        tmp_path,
        alone=train % ("OpenMathInstruct-2", ""),
        both=train % ("OpenMathInstruct-2", ", validation: {dataset_name: gsm8k}"),
        whole=train % ("DAPOMath17K", ", validation: {dataset_name: DAPOMathAIME2024}"),
        counted="policy: {model_name: a/b}\ndata: {train: {dataset_name: ResponseDataset, data_path: rows.jsonl, "
        "split_validation_size: 256}}\ngrpo: {val_period: 5}\n",
        sft="policy: {model_name: a/b}\ndata: {train: {dataset_name: OpenMathInstruct-2}}\nsft: {max_num_steps: 60, "
        "val_period: 10, val_at_start: false}\ncheckpointing: {enabled: true, metric_name: 'val:val_loss', higher_is_better: false}\n",
    )
    alone = convert_files("nemo_rl", [files["alone"]], [], {})
    assert alone.recipe["train_dataset.hold_out"] == 0.05
    both = convert_files("nemo_rl", [files["both"]], [], {})
    assert "data.train.split_validation_size" in both.unsupported()
    whole = convert_files("nemo_rl", [files["whole"]], [], {})
    assert "train_dataset.hold_out" not in whole.recipe
    assert "divides no rows of DAPOMath17K" in whole["data.train.split_validation_size"].note
    counted = convert_files("nemo_rl", [files["counted"]], [], {})
    assert (counted.recipe["train_dataset.hold_out"], counted.recipe["evaluator.freq_steps"]) == (256, 5)
    # Of what NeMo-RL holds out, it evaluates the first rows.
    few = convert_files("nemo_rl", [files["alone"]], ["grpo.max_val_samples=64"], {})
    assert (few.recipe["train_dataset.hold_out"], "valid_dataset.limit" in few.recipe) == (64, False)
    assert "evaluates 64 of them" in few["data.train.split_validation_size"].note
    # The share that this data set has without the key.
    sft = convert_files("nemo_rl", [files["sft"]], [], {})
    keys = ("train_dataset.hold_out", "evaluator.freq_steps", "evaluator.before_training", "recover.keep_best")
    assert [sft.recipe.get(key) for key in keys] == [0.05, 10, False, "eval/nll"]
    batches = ["sft.val_batches=8", "sft.val_global_batch_size=32"]
    assert convert_files("nemo_rl", [files["sft"]], batches, {}).recipe["train_dataset.hold_out"] == 8 * 32
    file = [*batches, "data.validation.dataset_name=ResponseDataset", "data.validation.data_path=b.jsonl"]
    named = convert_files("nemo_rl", [files["sft"]], ["data.train.dataset_name=squad", *file], {})
    assert named.recipe["valid_dataset.limit"] == 8 * 32
    assert "valid_dataset.limit" not in convert_files("nemo_rl", [files["sft"]], ["sft.val_batches=-1"], {}).recipe


def test_schedules_count_steps_and_not_the_updates_of_a_step() -> None:
    """NeMo-RL steps its schedules once after all updates on a step's samples."""
    words = (
        "policy.model_name=Qwen/Qwen3-8B", "policy.megatron_cfg.enabled=true", "policy.train_global_batch_size=128",
        "grpo.num_prompts_per_step=64", "grpo.num_generations_per_prompt=8", "policy.megatron_cfg.optimizer.lr=1e-6",
        "policy.megatron_cfg.scheduler.lr_warmup_iters=50", "policy.megatron_cfg.scheduler.lr_decay_style=linear",
    )  # fmt: skip
    unlimited = convert_words("nemo_rl", *words)
    assert (unlimited.recipe["actor.ppo_n_minibatches"], unlimited.recipe["actor.optimizer.warmup_steps"]) == (4, 200)
    iters = "policy.megatron_cfg.scheduler.lr_decay_iters"
    limited = convert_words("nemo_rl", *words, "grpo.max_num_steps=500", f"{iters}=500")
    assert limited.recipe["actor.optimizer.warmup_steps_proportion"] == 0.1
    assert limited[iters].outcome == "implied"
    assert iters in convert_words("nemo_rl", *words, "grpo.max_num_steps=500", f"{iters}=2000").unsupported()
    torch = ("0.name=torch.optim.lr_scheduler.LinearLR", "0.kwargs.total_iters=50", "1.name=ConstantLR")
    sharded = [word for word in words if "megatron" not in word]
    fsdp = convert_words("nemo_rl", *sharded, *(f"policy.scheduler.{word}" for word in torch))
    assert fsdp.recipe["actor.optimizer.warmup_steps"] == 200


def test_data_sets_with_answers_have_their_readers_and_columns() -> None:
    model, data = "policy.model_name=m", "data.train.dataset_name="
    held_out = ("data.validation.dataset_name=HelpSteer3", "data.validation.split=validation")
    pairs = convert_words("nemo_rl", model, f"{data}HelpSteer3", *held_out, "dpo.max_num_steps=9")
    assert pairs.unsupported() == set()
    assert pairs.recipe["train_dataset.reader"] == "fivefold.data.known:helpsteer3"
    assert (pairs.recipe["valid_dataset.path"], pairs.recipe["valid_dataset.split"]) == (
        "nvidia/HelpSteer3:preference", "validation",
    )  # fmt: skip
    whole = convert_words("nemo_rl", model, f"{data}Tulu3Preference", "dpo.max_num_steps=9")
    assert whole.recipe["train_dataset.path"] == "allenai/llama-3.1-tulu-3-8b-preference-mixture"
    for name in ("squad", "tulu3_sft_mixture"):
        talk = convert_words("nemo_rl", model, f"{data}{name}", "sft.max_num_steps=9")
        assert (talk.unsupported(), talk.recipe["train_dataset.messages_key"]) == (set(), "messages")
    # Pairs are no conversations to learn.
    other = convert_words("nemo_rl", model, f"{data}HelpSteer3", "sft.max_num_steps=9")
    assert other.unsupported() == {"data.train.dataset_name"}


def test_a_prompt_and_its_response_have_a_bound_together() -> None:
    key = "policy.max_total_sequence_length"
    words = ("policy.model_name=Qwen/Qwen3-8B", f"{key}=40960", "policy.generation.max_new_tokens=40960")
    conversion = convert_words("nemo_rl", *words, "data.max_input_seq_length=40960")
    assert (conversion.recipe["gconfig.max_tokens"], conversion[key].outcome) == (40960, "mapped")
    assert conversion.recipe["train_dataset.max_length"] == 40959
    assert conversion.report.problems == ()
    short = convert_words("nemo_rl", words[0], f"{key}=512")
    assert (short.recipe["gconfig.max_tokens"], short.recipe["train_dataset.max_length"]) == (512, 511)


def test_sequences_with_a_large_error_are_left_out_and_advantages_have_bounds() -> None:
    words = ["grpo.seq_logprob_error_threshold=2", "grpo.advantage_clip_low=-20", "grpo.advantage_clip_high=20"]
    conversion = convert_fixture("nemo_rl", BASE, words)
    correction = "actor.rollout_correction."
    found = {key.removeprefix(correction): conversion.recipe[key] for key in conversion.recipe if correction in key}
    assert found == {"method": "custom", "mask": "geometric", "mask_by": "error", "mask_above": 2}
    assert conversion.recipe["actor.advantage_clip"] == 20
    assert conversion.report.unsupported == []

    words = ["loss_fn.use_importance_sampling_correction=true", "loss_fn.truncated_importance_sampling_type=icepop"]
    words += ["loss_fn.truncated_importance_sampling_ratio=2.0", "grpo.seq_logprob_error_threshold=2"]
    both = convert_fixture("nemo_rl", BASE, [*words, "grpo.advantage_clip_low=-5", "grpo.advantage_clip_high=20"])
    keys = {entry.key for entry in both.report.unsupported}
    assert {"loss_fn.truncated_importance_sampling_type", "grpo.advantage_clip_low", "grpo.advantage_clip_high"} <= keys
    assert "actor.advantage_clip" not in both.recipe


def test_the_rule_of_dapo_compares_the_text_after_the_word_answer() -> None:
    words = ["grpo.num_prompts_per_step=8", "data.default.env_name=math"]
    dapo = convert_words("nemo_rl", *words, "env.math.math_verify_impl=dapo_math_verify")
    assert dapo.unsupported() == set()
    kwargs = {key.rpartition(".")[2]: value for key, value in dapo.recipe.items() if key.startswith("reward.")}
    assert kwargs == {"fn": "exact_match", "pattern": r"(?i)Answer\s*:\s*([^\n]+)", "minerva": True}
    other = convert_words("nemo_rl", *words, "env.math.math_verify_impl=other")
    assert other.unsupported() == {"env.math.math_verify_impl"}
