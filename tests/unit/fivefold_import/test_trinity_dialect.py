"""Trinity-RFT: explorer and trainer in one file, with verl's key tree below the trainer."""

from __future__ import annotations

from pathlib import Path

from dialect_conversion import convert_files, convert_fixture, convert_text, convert_words

TREE = "trainer.trainer_config."


def test_a_reference_laid_out_as_the_actor_has_no_layout_of_its_own() -> None:
    conversion = convert_fixture("trinity", "trinity_ppo_megatron.yaml")
    reference = [entry for entry in conversion.report.entries if entry.key.startswith(TREE + "actor_rollout_ref.ref.")]
    assert reference
    assert {entry.outcome for entry in reference} == {"implied"}


def test_the_trainers_file_may_stand_apart(tmp_path: Path) -> None:
    run, trainer = tmp_path / "run.yaml", tmp_path / "train.yaml"
    run.write_text(
        "model: {model_path: some/model}\ntrainer: {trainer_config_path: train.yaml}\ncluster: {gpu_per_node: 4}\n",
        encoding="utf-8",
    )
    trainer.write_text(
        "actor_rollout_ref: {actor: {strategy: megatron, megatron: {tensor_model_parallel_size: 3}}}\n",
        encoding="utf-8",
    )
    path = "trainer.trainer_config_path"
    assert convert_files("trinity", [run], [], {})[path].outcome == "unsupported"
    conversion = convert_files("trinity", [run, trainer], [], {})
    assert conversion[path].outcome == "implied"
    # The number of nodes is not written, so the number of replicas is not known.
    assert conversion.recipe["actor.backend"] == "megatron:d*t3"


def test_interpolations_of_the_trainers_file_stay_in_it(tmp_path: Path) -> None:
    run, trainer = tmp_path / "run.yaml", tmp_path / "train.yaml"
    run.write_text("model: {model_path: some/model}\n", encoding="utf-8")
    trainer.write_text(
        "data: {clip: 0.1}\nactor_rollout_ref: {actor: {grad_clip: '${data.clip}', ppo_epochs: '${.epochs}', epochs: 2}}\n",
        encoding="utf-8",
    )
    recipe = convert_files("trinity", [run, trainer], [], {}).recipe
    assert recipe["actor.optimizer.gradient_clipping"] == 0.1
    assert recipe["actor.ppo_epochs"] == 2


def test_a_system_prompt_that_trinity_adds_is_noted(tmp_path: Path) -> None:
    text = "buffer: {explorer_input: {default_workflow_type: %s, taskset: {path: data/train.jsonl}}}\n"
    notes = [
        convert_text("trinity", tmp_path, text % kind).report.notes for kind in ("math_workflow", "simple_workflow")
    ]
    assert [any("math_workflow asks for <think>" in note for note in each) for each in notes] == [True, False]


def test_keys_of_the_first_releases_are_read_by_their_later_names(tmp_path: Path) -> None:
    text = "model: {model_path: some/model}\ndata: {dataset_path: a.jsonl}\nexplorer: {engine_num: 3}\n"
    recipe = convert_text("trinity", tmp_path, text).recipe
    assert recipe["train_dataset.path"] == "a.jsonl"
    assert recipe["rollout.backend"].endswith(":d3")


def test_trinitys_own_keys_override_those_of_the_tree() -> None:
    loss = "algorithm.policy_loss_fn_args."
    actor = TREE + "actor_rollout_ref.actor."
    devices = ["cluster.node_num=2", "cluster.gpu_per_node=8", "explorer.rollout_model.engine_num=8"]
    recipe = convert_words(
        "trinity",
        *devices,
        f"{loss}clip_range_low=0.1",
        f"{loss}clip_range_high=0.3",
        f"{actor}clip_ratio=0.4",
        "trainer.trainer_strategy=megatron",
        "trainer.megatron.tensor_model_parallel_size=4",
        f"{actor}strategy=fsdp",
        f"{actor}megatron.tensor_model_parallel_size=2",
        "trainer.max_token_len_per_gpu=1000",
        f"{actor}ppo_micro_batch_size_per_gpu=3",
    ).recipe
    assert (recipe["actor.eps_clip"], recipe["actor.eps_clip_higher"]) == (0.1, 0.3)
    assert recipe["actor.backend"] == "megatron:d2t4"
    assert recipe["actor.mb_spec.max_tokens_per_mb"] == 1000
    assert convert_words("trinity", f"{actor}clip_ratio=0.4").recipe["actor.eps_clip"] == 0.4


def test_the_kl_term_is_a_loss_or_a_penalty() -> None:
    loss, penalty = "algorithm.kl_loss_fn", "algorithm.kl_penalty_fn"
    for words, place, weight, estimator in (
        (["algorithm.algorithm_type=grpo"], "loss", 0.001, "k2"),
        (["algorithm.algorithm_type=dapo"], None, None, None),
        ([f"{loss}=none"], None, None, None),
        ([f"{loss}=none", f"{penalty}=k1", f"{penalty}_args.kl_coef=0.1"], "reward", 0.1, "k1"),
        # The first releases had it in verl's tree.
        ([f"{TREE}actor_rollout_ref.actor.use_kl_loss=True"], "loss", 0.001, "k3"),
    ):
        recipe = convert_words("trinity", *words).recipe
        written = tuple(recipe.get(f"actor.{name}") for name in ("kl_in", "kl_ctl", "kl_estimator"))
        assert written == (place, weight, estimator), words
    assert convert_words("trinity", f"{penalty}=k1").unsupported() >= {penalty}


def test_a_converted_checkpoint_is_where_the_actor_starts() -> None:
    conversion = convert_fixture(
        "trinity",
        "trinity_ppo_megatron.yaml",
        [
            f"{TREE}actor_rollout_ref.actor.megatron.use_dist_checkpointing=true",
            f"{TREE}actor_rollout_ref.actor.megatron.dist_checkpointing_path=/data/mcore",
        ],
    )
    assert conversion.recipe["actor.megatron.use_dist_checkpointing"] is True
    assert conversion.recipe["actor.megatron.dist_checkpointing_path"] == "/data/mcore"


def test_a_warmup_in_steps_of_the_trainer_is_one_in_updates() -> None:
    """A step of the trainer trains `train_batch_size` experiences; a step here has several of those."""
    optimizer = "algorithm.optimizer."
    words = ["buffer.batch_size=64", "algorithm.repeat_times=8", "buffer.train_batch_size=256", "buffer.total_epochs=1"]
    given = [
        f"{optimizer}lr_warmup_steps=10",
        f"{optimizer}lr_warmup_steps_ratio=0.1",
        f"{TREE}actor_rollout_ref.actor.ppo_epochs=2",
    ]
    recipe = convert_words("trinity", *words, *given).recipe
    assert recipe["actor.ppo_n_minibatches"] == 2
    assert recipe["actor.optimizer.warmup_steps"] == 10 * 2
    assert "actor.optimizer.warmup_steps_proportion" not in recipe
    counted = convert_words("trinity", *words, *given, "buffer.total_steps=100").recipe
    assert counted["actor.optimizer.warmup_steps_proportion"] == 0.1


def test_a_response_of_one_token_is_no_limit(tmp_path: Path) -> None:
    """A limit would cut the distribution of the first token, which switches the correction of the rollout off."""
    text = "model: {model_path: some/model, min_response_tokens: %d}\nsynchronizer: {sync_offset: 1}\n"
    one, five = (convert_text("trinity", tmp_path, text % fewest) for fewest in (1, 5))
    assert one["model.min_response_tokens"].outcome == "implied"
    assert not {"gconfig.min_new_tokens", "actor.rollout_correction.method"} & one.recipe.keys()
    assert (five.recipe["gconfig.min_new_tokens"], five.recipe["actor.rollout_correction.method"]) == (5, "none")


def test_a_replay_buffer_trains_samples_again_if_they_come_back_to_it() -> None:
    own = "buffer.trainer_input.experience_buffer.replay_buffer."
    words = [
        f"{own}enable=true",
        f"{own}priority_fn=linear_decay",
        f"{own}priority_fn_args.decay=0.6",
        "buffer.batch_size=96",
    ]
    once = convert_words("trinity", *words, f"{own}reuse_cooldown_time=null")
    assert not [key for key in once.recipe if key.startswith("rollout.replay_buffer")]
    off = convert_words("trinity", f"{own}enable=false", *words[1:], f"{own}reuse_cooldown_time=3")
    assert not [key for key in off.recipe if key.startswith("rollout.replay_buffer")]
    again = convert_words("trinity", *words, f"{own}reuse_cooldown_time=3", "synchronizer.sync_interval=4")
    limited = convert_words(
        "trinity", f"{own}enable=true", f"{own}reuse_cooldown_time=3", f"{own}priority_fn=decay_limit_randomization",
        f"{own}priority_fn_args.sigma=0.5", f"{own}priority_fn_args.use_count_limit=4",
    )  # fmt: skip
    for conversion in (once, off, again, limited):
        assert conversion.unsupported() == set()
    at = "rollout.replay_buffer."
    assert (again.recipe[f"{at}batch_size"], again.recipe[f"{at}decay"]) == (96, 0.6)
    assert (again.recipe["rollout.max_head_offpolicyness"], again.recipe[f"{at}max_age"]) == (3, 10)
    assert again.recipe[f"{at}max_uses"] == 1000
    assert (limited.recipe[f"{at}sigma"], limited.recipe[f"{at}max_uses"]) == (0.5, 4)
    assert limited.recipe["rollout.max_head_offpolicyness"] == 1
    other = convert_words("trinity", f"{own}enable=true", f"{own}reuse_cooldown_time=3", f"{own}priority_fn=newest")
    assert other.unsupported() == {f"{own}priority_fn"}


def test_a_task_set_has_its_own_workflow_and_reward() -> None:
    own = "buffer.explorer_input.taskset."
    conversion = convert_words("trinity", f"{own}default_workflow_type=math_workflow", f"{own}default_reward_fn_type=x")
    assert conversion[f"{own}default_workflow_type"].outcome == "implied"
    assert "'x' is not offered" in conversion[f"{own}default_reward_fn_type"].note
    known = convert_words("trinity", f"{own}default_reward_fn_type=math_reward")
    assert known.recipe["reward.fn"] == "math"


def test_the_reward_of_countdown_has_a_counterpart() -> None:
    key = "buffer.explorer_input.taskset.default_reward_fn_type"
    conversion = convert_words("trinity", "model.model_path=m", f"{key}=countdown_reward")
    assert (conversion.recipe["reward.fn"], conversion[key].outcome) == ("countdown", "mapped")


def test_a_critics_budget_counts_where_the_trainers_micro_batches_have_one(tmp_path: Path) -> None:
    text = (
        "algorithm: {algorithm_type: ppo}\nmodel: {model_path: some/model}\n"
        "trainer: {use_dynamic_bsz: %s, trainer_config: {critic: {ppo_max_token_len_per_gpu: 32768, ppo_micro_batch_size_per_gpu: 4}}}\n"
    )
    key, budget = TREE + "critic.ppo_max_token_len_per_gpu", "critic.mb_spec.max_tokens_per_mb"
    counted = convert_text("trinity", tmp_path, text % "true")
    assert counted[key].to == budget
    assert counted.recipe[budget] == 32768
    assert counted[TREE + "critic.ppo_micro_batch_size_per_gpu"].outcome == "implied"
    assert budget not in convert_text("trinity", tmp_path, text % "false").recipe
