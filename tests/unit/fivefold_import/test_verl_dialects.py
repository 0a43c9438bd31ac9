"""verl, and siiRL with verl's key tree: launch scripts and the trainer's YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dialect_conversion import ENVIRONMENT, convert_fixture, convert_words
from typer.testing import CliRunner

from fivefold.cli.main import app
from fivefold_import.framework import Framework
from fivefold_import.recipe import import_recipe

ACTOR = "actor_rollout_ref.actor."
ROLLOUT = "actor_rollout_ref.rollout."
MODEL = "actor_rollout_ref.model."
MEGATRON = ACTOR + "megatron."
OVERRIDE = MEGATRON + "override_transformer_config."


def test_without_a_critic_its_keys_have_no_effect() -> None:
    grpo = convert_words("verl", "algorithm.adv_estimator=grpo", "critic.optim.lr=1e-5", "trainer.critic_warmup=5")
    assert not [key for key in grpo.recipe if key.startswith("critic.")]
    assert {grpo[key].outcome for key in ("critic.optim.lr", "trainer.critic_warmup")} == {"implied"}


def test_a_critic_has_the_aggregation_of_the_actor_unless_it_has_its_own() -> None:
    of_actor, own = "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum", "critic.loss_agg_mode=token-mean"
    for framework in ("verl", "siirl"):
        assert convert_words(framework, of_actor).recipe["critic.loss_aggregation"] == "sequence_sum"
        assert convert_words(framework, of_actor, own).recipe["critic.loss_aggregation"] == "token_mean"
        assert "critic.loss_aggregation" not in convert_words(framework, "critic.cliprange_value=0.2").recipe
    fixed = convert_words("verl", "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm")
    assert "critic.loss_aggregation" not in fixed.recipe
    assert any("whose errors have no such aggregation" in note for note in fixed.report.notes)


def test_router_replay_has_the_names_of_other_frameworks() -> None:
    for mode, ours in (("disabled", "none"), ("R2", "old_logprobs"), ("R3", "rollout")):
        for key in (ACTOR + "router_replay.mode", MEGATRON + "router_replay.mode"):
            assert convert_words("verl", f"{key}={mode}").recipe["actor.router_replay"] == ours
    both = convert_words("verl", f"{ACTOR}router_replay.mode=R3", f"{ROLLOUT}enable_rollout_routing_replay=True")
    assert both.unsupported() == set()
    for mode, ours in (("disable", "none"), ("R2", "old_logprobs"), ("R3", "rollout")):
        words = [f"{role}.router_replay.mode={mode}" for role in ("actor_train", "actor_infer")]
        built = "actor_train.strategy_args.strategy_config.moe_enable_routing_replay=true"
        trainer = "actor_train.strategy_args.strategy_name=megatron_train"
        roll = convert_words("roll", *words, trainer, built, "reference.router_replay.mode=disable")
        assert roll.recipe["actor.router_replay"] == ours
        assert roll.unsupported() == set()
    assert convert_words("trinity", "algorithm.enable_router_replay=true").recipe["actor.router_replay"] == "rollout"


def test_the_rate_of_siirl_on_megatron_stays_unless_a_schedule_is_written() -> None:
    """Its workers on Megatron build the schedule and never step it."""
    engine = f"{ACTOR}strategy=megatron"
    for words, role in ((["algorithm.adv_estimator=gae"], "critic"), (["algorithm.adv_estimator=grpo"], "actor")):
        conversion = convert_words("siirl", engine, *words)
        assert conversion.recipe.get(f"{role}.optimizer.lr_scheduler_type", "constant") == "constant"
        assert any("never step it" in note for note in conversion.report.notes)
    written = convert_words("siirl", engine, f"{ACTOR}optim.lr_decay_style=linear")
    assert written.recipe["actor.optimizer.lr_scheduler_type"] == "linear"


def test_vllm_takes_the_place_of_engines_that_are_not_here() -> None:
    for words in (("verl", f"{ROLLOUT}name=trtllm"), ("nemo_rl", "policy.generation.backend=megatron")):
        conversion = convert_words(*words, "policy.model_name=m") if words[0] == "nemo_rl" else convert_words(*words)
        assert conversion.unsupported() == set()
        assert conversion.recipe["rollout.backend"].startswith("vllm:")
        assert any("vLLM generates in the place of" in note for note in conversion.report.notes)


def test_megatron_fsdp_becomes_the_distributed_optimizer_with_a_note() -> None:
    for value, is_noted in (("True", True), ("False", False)):
        key = f"{MEGATRON}use_megatron_fsdp"
        conversion = convert_words("verl", f"{ACTOR}strategy=megatron", f"{key}={value}")
        assert conversion[key].outcome == "implied"
        assert any("Megatron-FSDP shards" in note for note in conversion.report.notes) is is_noted


def test_veomni_is_laid_out_as_fsdp_or_with_spread_experts_as_megatron() -> None:
    at, cluster = f"{ACTOR}veomni.", ("trainer.nnodes=2", "trainer.n_gpus_per_node=8")
    own = (
        f"{at}param_offload=True", f"{at}enable_full_shard=True", f"{at}fsdp_size=-1", f"{at}ulysses_parallel_size=2",
        f"{at}attn_implementation=flash_attention_2", f"{at}router_replay.mode=R2", "model_engine=veomni",
    )  # fmt: skip
    sharded = convert_words("verl", *cluster, *own, f"{at}expert_parallel_size=1", f"{at}optimizer_offload=False")
    assert sharded.recipe["actor.backend"] == "fsdp:d8c2"
    assert (sharded.recipe["actor.offload.params"], sharded.recipe["actor.router_replay"]) == (True, "old_logprobs")
    spread = convert_words("verl", *cluster, *own, f"{at}expert_parallel_size=4", f"{MODEL}path=Qwen/Qwen3-30B-A3B")
    assert spread.recipe["actor.backend"] == "megatron:d8c2e4"
    assert any("in the place of VeOmni" in note for note in spread.report.notes)
    assert sharded.unsupported() == spread.unsupported() == set()
    assert convert_words("verl", *cluster, *own, f"{at}fsdp_size=8").unsupported() == {f"{at}fsdp_size"}
    assert convert_words("verl", *cluster, *own, f"{at}fsdp_size=16").unsupported() == set()


def test_a_trainers_yaml_reads_the_environment() -> None:
    conversion = convert_fixture("verl", "verl_trainer.yaml", environment={"TRAIN_FILE": "/other.parquet"})
    assert conversion.recipe["train_dataset.path"] == "/other.parquet"
    assert conversion["critic.strategy"].outcome == "implied"


def test_the_environment_and_overrides_scale_a_script() -> None:
    environment = {**ENVIRONMENT, "PET_NNODES": "3"}
    recipe = convert_fixture("siirl", "siirl_megatron.sh", environment=environment).recipe
    assert recipe["train_dataset.batch_size"] == 3 * 96
    assert recipe["actor.backend"] == "megatron:d6p2t2"
    recipe = convert_fixture("siirl", "siirl_megatron.sh", overrides=["trainer.n_gpus_per_node=4"]).recipe
    assert recipe["actor.backend"] == "megatron:d1p2t2"


def test_an_expert_tensor_degree_that_is_written_holds() -> None:
    environment = {**ENVIRONMENT, "ACTOR_ETP": "1"}
    conversion = convert_fixture("verl", "verl_moe_megatron.sh", environment=environment)
    assert conversion.recipe["actor.backend"] == "megatron:d4p4t2c2e2"
    assert conversion[MEGATRON + "expert_tensor_parallel_size"].outcome == "mapped"


def test_experts_stay_whole_where_split_ones_do_not_fit() -> None:
    """16 devices in p4 * c2 leave stages of 4 ranks, where e4 has no room for t2."""
    environment = {**ENVIRONMENT, "NNODES": "2", "ACTOR_EP": "4"}
    conversion = convert_fixture("verl", "verl_moe_megatron.sh", environment=environment)
    assert conversion.recipe["actor.backend"] == "megatron:d1p4t2c2e4"
    assert any("expert tensor degree" in note for note in conversion.report.notes)


def test_fsdp_stays_fsdp() -> None:
    words = (
        f"{ACTOR}ulysses_sequence_parallel_size=2 {ACTOR}fsdp_config.wrap_policy.min_num_params=0 "
        f"{ACTOR}fsdp_config.forward_prefetch=True {ACTOR}fsdp_config.reshard_after_forward=False {ACTOR}fsdp_config.param_offload=True {ACTOR}fsdp_config.fsdp_size=4 "
        f"{OVERRIDE}moe_z_loss_coeff=0.1 {MODEL}enable_gradient_checkpointing=True trainer.nnodes=2"
    ).split()
    for strategy in ("fsdp", "fsdp2"):
        conversion = convert_words("verl", f"{ACTOR}strategy={strategy}", *words)
        assert conversion.recipe["actor.backend"] == "fsdp:d8c2"
        assert conversion[ACTOR + "strategy"].outcome == "mapped"
        checkpointing = conversion[MODEL + "enable_gradient_checkpointing"]
        assert (checkpointing.to, checkpointing.result) == ("actor.fsdp.recompute", "full")
        assert conversion.unsupported() == {ACTOR + "fsdp_config.fsdp_size"}
        assert conversion.recipe["actor.fsdp.reshard_after_forward"] is False
        # Megatron-Core's options had no effect there.
        assert "actor.megatron.transformer.moe_z_loss_coeff" not in conversion.recipe


def test_gradient_checkpointing_that_is_off_recomputes_nothing() -> None:
    switch = MODEL + "enable_gradient_checkpointing"
    conversion = convert_words("verl", f"{ACTOR}strategy=fsdp", f"{switch}=False")
    assert conversion[switch].outcome == "implied"
    assert "actor.fsdp.recompute" not in conversion.recipe


def test_pipelines_of_unequal_stages_are_kept() -> None:
    """94 layers divide over neither 8 nor 12 stages."""
    pp, override = MEGATRON + "pipeline_model_parallel_size", OVERRIDE + "num_layers_in_"
    words = [f"{MODEL}path=Qwen/Qwen3-235B-A22B", "trainer.nnodes=32", f"{MEGATRON}tensor_model_parallel_size=4",
             f"{MEGATRON}expert_tensor_parallel_size=1", f"{pp}=8"]  # fmt: skip
    ends = [f"+{override}{end}_pipeline_stage=11" for end in ("first", "last")]
    for options in ([], ends):
        conversion = convert_words("verl", *words, *options)
        assert conversion.recipe["actor.backend"] == "megatron:d8p8t4"
        assert not conversion.unsupported()
    for end in ("first", "last"):
        assert conversion.recipe[f"actor.megatron.transformer.num_layers_in_{end}_pipeline_stage"] == 11


def test_what_is_recomputed_is_kept() -> None:
    base = f"{ACTOR}strategy=megatron"
    layers = convert_words(
        "verl", base, *(f"+{OVERRIDE}recompute_{name}" for name in ("granularity=full", "method=block", "num_layers=3"))
    )
    assert layers.recipe["actor.megatron.transformer.recompute_method"] == "block"
    assert layers.recipe["actor.megatron.transformer.recompute_num_layers"] == 3
    modules = convert_words(
        "verl", base, f"+{OVERRIDE}recompute_granularity=selective", f"+{OVERRIDE}recompute_modules=[core_attn,moe_act]"
    )
    assert modules.recipe["actor.megatron.transformer.recompute_modules"] == ["core_attn", "moe_act"]


def test_an_option_of_megatrons_optimizer() -> None:
    option = ACTOR + "optim.override_optimizer_config.decoupled_weight_decay"
    conversion = convert_words("verl", f"{ACTOR}strategy=megatron", f"+{option}=False")
    assert conversion.recipe["actor.megatron.optimizer.decoupled_weight_decay"] is False


def test_offloading_of_the_actor_is_asked_for_where_it_is_on() -> None:
    switches = [f"{MEGATRON}{kind}_offload" for kind in ("param", "grad", "optimizer")]
    on = convert_words("verl", f"{ACTOR}strategy=megatron", *(f"{switch}=True" for switch in switches))
    assert {key: value for key, value in on.recipe.items() if key.startswith("actor.offload")} == {
        "actor.offload.params": True,
        "actor.offload.grads": True,
        "actor.offload.optimizer": True,
    }
    off = convert_words("verl", f"{ACTOR}strategy=megatron", *(f"{switch}=False" for switch in switches))
    assert not [key for key in off.recipe if key.startswith("actor.offload")]
    assert not off.unsupported()
    reference = convert_words("verl", f"{ACTOR}strategy=megatron", "actor_rollout_ref.ref.megatron.param_offload=True")
    assert reference["actor_rollout_ref.ref.megatron.param_offload"].outcome == "implied"


def test_the_place_and_the_precision_of_the_optimizers_state() -> None:
    options = {"optimizer_cpu_offload": True, "exp_avg_dtype": "bf16", "use_precision_aware_optimizer": True}
    section = ACTOR + "optim.override_optimizer_config."
    conversion = convert_words("verl", f"{ACTOR}strategy=megatron", *(f"+{section}{k}={v}" for k, v in options.items()))
    assert conversion.recipe["actor.megatron.optimizer.state_on"] == "host"
    assert conversion.recipe["actor.megatron.optimizer.exp_avg_dtype"] == "bfloat16"
    assert not conversion.unsupported()


def test_a_warmup_of_a_run_without_a_number_of_steps_counts_updates() -> None:
    """verl's schedule advances once a step, after all updates of the step; Fivefold's once an update."""
    frameworks: list[Framework] = ["verl", "siirl"]
    for framework in frameworks:
        conversion = convert_words(
            framework, "data.train_batch_size=512", f"{ACTOR}ppo_mini_batch_size=128", f"{ACTOR}ppo_epochs=2",
            f"{ACTOR}optim.lr_warmup_steps=10", f"{ACTOR}optim.lr_warmup_steps_ratio=0.1", "algorithm.adv_estimator=gae",
            "critic.optim.lr_warmup_steps=5", "critic.ppo_mini_batch_size=256",
        )  # fmt: skip
        assert conversion.recipe["actor.optimizer.warmup_steps"] == 10 * 4 * 2
        assert conversion.recipe["critic.optimizer.warmup_steps"] == 5 * 2
        assert "actor.optimizer.warmup_steps_proportion" not in conversion.recipe
        assert conversion[ACTOR + "optim.lr_warmup_steps"].note == "10 steps of 8 updates"


def test_what_cannot_be_converted_says_why() -> None:
    cases = [
        (f"data.train_batch_size=100 {ACTOR}ppo_mini_batch_size=30", ACTOR + "ppo_mini_batch_size", "100"),
        (
            f"trainer.n_gpus_per_node=6 {ACTOR}strategy=megatron {MEGATRON}tensor_model_parallel_size=4",
            MEGATRON + "tensor_model_parallel_size",
            "6 devices",
        ),
        ("algorithm.adv_estimator=gdpo", "algorithm.adv_estimator", "gdpo"),
        (f"{ROLLOUT}name=lmdeploy", ROLLOUT + "name", "lmdeploy"),
        (
            f"data.max_response_length=9 {ROLLOUT}response_length=8",
            ROLLOUT + "response_length",
            "response_length sets to 9",
        ),
        (f"{MODEL}lora_rank=0.5", MODEL + "lora_rank", "whole number"),
        (f"{ACTOR}policy_loss.loss_mode=dppo", ACTOR + "policy_loss.loss_mode", "clipped"),
        (f"{ACTOR}clip_ratio=0.3", ACTOR + "clip_ratio", "clip_ratio_low and clip_ratio_high"),
    ]
    frameworks: list[Framework] = ["verl", "siirl"]
    for framework in frameworks:
        for words, key, note in cases:
            conversion = convert_words(framework, *words.split())
            assert key in conversion.unsupported(), (framework, words)
            assert note in conversion[key].note, (framework, words)
    assert "actor.eps_clip" not in convert_words("verl", f"{ACTOR}clip_ratio=0.3").recipe


def test_a_served_reward_model_is_unsupported_with_all_its_keys() -> None:
    section = "reward.reward_model."
    path = f"{section}model_path=some/judge"
    assert convert_words("verl", path).unsupported() == set()
    conversion = convert_words("verl", path, f"{section}enable=True")
    assert conversion.unsupported() == {f"{section}model_path", f"{section}enable"}


JUDGED = [
    *(f"reward.reward_model.{key}" for key in ("enable=True", "model_path=some/judge")),
    *(f"reward.reward_model.rollout.{key}" for key in ("name=sglang", "tensor_model_parallel_size=4", "dtype=bfloat16")),
    *(f"reward.reward_model.rollout.{key}" for key in ("prompt_length=4096", "response_length=1024", "max_num_seqs=64")),
    "reward.reward_model.rollout.gpu_memory_utilization=0.8", "reward.reward_model.rollout.skip_tokenizer_init=False",
    "reward.custom_reward_function.path=my/score.py", "reward.custom_reward_function.name=judge",
]  # fmt: skip


def test_a_served_model_that_a_function_asks_is_the_judge_of_the_run() -> None:
    judge = {
        "reward.fn": "judge",
        "reward.kwargs.max_tokens": 1024,
        "reward.judge.path": "some/judge",
        "reward.judge.dtype": "bfloat16",
        "reward.judge.backend": "sglang:d2t4",
        "reward.judge.max_length": 4096 + 1024,
        "reward.judge.max_batch_size": 64,
    }

    def of_reward(*words: str) -> dict[str, Any]:
        conversion = convert_words("verl", *JUDGED, "trainer.n_gpus_per_node=8", *words)
        assert conversion.unsupported() == {"reward.custom_reward_function.path"}
        note = conversion["reward.custom_reward_function.path"].note
        assert "asks the model that judges: reward.fn=judge asks its own question" in note
        keys = ("reward.", "cluster.n")
        return {key: value for key, value in conversion.recipe.items() if key.startswith(keys)}

    cluster = {"cluster.n_nodes": 1, "cluster.n_gpus_per_node": 8}
    assert of_reward("trainer.nnodes=1") == {**judge, **cluster, "reward.judge.colocate": True}
    own = [f"reward.reward_model.{key}" for key in ("enable_resource_pool=True", "nnodes=1", "n_gpus_per_node=8")]
    share = {"reward.judge.memory_fraction": 0.8}
    assert of_reward("trainer.nnodes=2", *own) == {**judge, **cluster, **share, "cluster.n_nodes": 3}


def test_devices_of_a_judge_that_are_no_cluster_with_the_others_are_unsupported() -> None:
    own = [f"reward.reward_model.{key}" for key in ("enable_resource_pool=True", "nnodes=2", "n_gpus_per_node=4")]
    conversion = convert_words("verl", *JUDGED, "trainer.n_gpus_per_node=8", "trainer.nnodes=1", *own)
    assert {key.partition("=")[0] for key in own} <= conversion.unsupported()
    assert conversion.recipe["reward.judge.colocate"] is True


def test_a_reward_model_with_a_score_head_is_a_role() -> None:
    section = "reward_model."
    words = (f"{section}model.path=some/scorer", f"{section}micro_batch_size_per_gpu=4")
    off = convert_words("verl", *words)
    assert off.unsupported() == set()
    assert "reward.model.path" not in off.recipe
    conversion = convert_words(
        "verl", *words, f"{section}enable=True", f"{section}megatron.param_offload=True",
        f"{section}megatron.tensor_model_parallel_size=4",
    )  # fmt: skip
    assert {key: value for key, value in conversion.recipe.items() if key.startswith("reward.")} == {
        "reward.fn": "model",
        "reward.model.path": "some/scorer",
        "reward.model.offload": True,
        "reward.model.backend": conversion.recipe["actor.backend"],
    }
    assert conversion.unsupported() == {f"{section}megatron.tensor_model_parallel_size"}
    assert convert_words("verl", f"{section}enable=True").unsupported() == {f"{section}enable"}


def test_a_reward_function_of_ones_own_is_named_by_its_file() -> None:
    for section in ("custom_reward_function.", "reward.custom_reward_function."):
        words = (f"{section}path=my/score.py", f"{section}reward_kwargs.bonus=0.5")
        conversion = convert_words("verl", *words, f"{section}name=judge")
        assert conversion.recipe["reward.fn"] == "my/score.py:judge"
        assert conversion.recipe["reward.kwargs.bonus"] == 0.5
        assert conversion.unsupported() == set()
        assert convert_words("verl", *words).recipe["reward.fn"] == "my/score.py:compute_score"
        assert convert_words("verl", f"{section}path=pkg://my.score").unsupported() == {f"{section}path"}
        assert "reward.fn" not in convert_words("verl", f"{section}path=null", f"{section}name=judge").recipe


def test_each_side_of_the_clip_range_has_its_own_default() -> None:
    cases: list[tuple[str, float, float | None]] = [
        ("clip_ratio=0.2", 0.2, None),
        ("clip_ratio_high=0.28", 0.2, 0.28),
        ("clip_ratio_low=0.1", 0.1, 0.2),
        ("clip_ratio=0.3 clip_ratio_low=0.1 clip_ratio_high=0.4", 0.1, 0.4),
    ]
    for words, low, high in cases:
        conversion = convert_words("verl", *(ACTOR + word for word in words.split()))
        assert conversion.recipe.get("actor.eps_clip") == low, words
        assert conversion.recipe.get("actor.eps_clip_higher") == high, words
        assert conversion.unsupported() == set(), words


def test_held_out_prompts_are_sampled_at_the_temperature_that_is_written() -> None:
    own = ROLLOUT + "val_kwargs."
    cases: list[tuple[list[str], bool | None, float | None]] = [
        (["temperature=1.0"], False, 1.0),
        (["temperature=0.6", "do_sample=True"], False, 0.6),
        (["temperature=0"], None, None),  # Evaluation is greedy by default.
        (["n=1"], None, None),
        (["temperature=1.0", "do_sample=False"], True, None),
    ]
    for words, greedy, temperature in cases:
        recipe = convert_words("verl", "data.val_files=v.parquet", *(own + word for word in words)).recipe
        assert recipe.get("evaluator.greedy") is greedy, words
        assert recipe.get("evaluator.temperature") == temperature, words


def test_siirl_reads_another_key_for_the_schedule_on_fsdp() -> None:
    conversion = convert_words("siirl", f"{ACTOR}strategy=fsdp", f"{ACTOR}optim.warmup_style=cosine")
    assert conversion.recipe["actor.optimizer.lr_scheduler_type"] == "cosine"


def test_the_references_options_do_not_change_the_actor() -> None:
    reference = "actor_rollout_ref.ref.megatron."
    words = [f"{reference}override_transformer_config.moe_router_dtype=fp32", f"+{reference}param_dtype=float32"]
    conversion = convert_words("verl", *words)
    assert conversion.unsupported() == set()
    assert "actor.dtype" not in conversion.recipe
    assert "actor.megatron.router_dtype" not in conversion.recipe


def test_a_megatron_core_checkpoint_is_where_actor_and_reference_start() -> None:
    reference = "actor_rollout_ref.ref.megatron."
    on = [f"{section}use_dist_checkpointing=true" for section in (MEGATRON, reference)]
    words = [f"{MODEL}path=Qwen/Qwen3-8B", *on, f"{MEGATRON}dist_checkpointing_path=/data/mcore"]
    conversion = convert_words("siirl", *words, f"{reference}dist_checkpointing_path=/data/mcore")
    assert conversion.recipe["actor.path"] == "Qwen/Qwen3-8B"
    assert conversion.recipe["actor.megatron.use_dist_checkpointing"] is True
    assert conversion.recipe["actor.megatron.dist_checkpointing_path"] == "/data/mcore"
    assert conversion[reference + "dist_checkpointing_path"].outcome == "implied"
    conversion = convert_words("verl", *words, f"{reference}dist_checkpointing_path=/data/other")
    assert conversion[reference + "dist_checkpointing_path"].outcome == "unsupported"
    assert "`fivefold convert`" in conversion[reference + "dist_checkpointing_path"].note
    conversion = convert_words("verl", f"{MODEL}path=m", f"{MEGATRON}dist_checkpointing_path=/data/mcore")
    assert "actor.megatron.dist_checkpointing_path" not in conversion.recipe
    assert conversion[MEGATRON + "dist_checkpointing_path"].outcome == "implied"


def test_the_bridge_that_is_not_vanilla_is_kept() -> None:
    words = [f"{ACTOR}strategy=megatron", f"{ACTOR}megatron.use_mbridge=True", f"{ACTOR}megatron.vanilla_mbridge="]
    for vanilla, bridge in (("False", "megatron-bridge"), ("True", None)):
        recipe = convert_words("verl", *words[:2], words[2] + vanilla).recipe
        assert recipe.get("actor.megatron.bridge_type") == bridge


def test_siirl_has_its_own_names_of_what_megatron_core_recomputes() -> None:
    switch, own = (
        f"{MODEL}enable_gradient_checkpointing=",
        f"{MODEL}gradient_checkpointing_kwargs.activations_checkpoint_",
    )
    words = [f"{ACTOR}strategy=megatron", f"{own}granularity=full", f"{own}method=block", f"{own}num_layers=3"]
    conversion = convert_words("siirl", *words, switch + "True")
    assert conversion.unsupported() == set()
    assert conversion.recipe["actor.megatron.recompute"] == "full"
    assert conversion.recipe["actor.megatron.transformer.recompute_method"] == "block"
    assert conversion.recipe["actor.megatron.transformer.recompute_num_layers"] == 3
    assert conversion[f"{own}granularity"].to == "actor.megatron.recompute"
    assert "actor.megatron.recompute" not in convert_words("siirl", *words, switch + "False").recipe


def test_gradient_checkpointing_that_is_asked_for_recomputes_with_megatron_core_too() -> None:
    for framework in ("verl", "siirl"):
        words = [f"{ACTOR}strategy=megatron", f"{MODEL}enable_gradient_checkpointing=True"]
        assert convert_words(framework, *words).recipe["actor.megatron.recompute"] == "selective"
        assert "actor.megatron.recompute" not in convert_words(framework, words[0]).recipe


def test_a_script_that_asks_for_gradient_checkpointing_fits_as_it_does_there(tmp_path: Path) -> None:
    """A micro-batch of eight whole sequences is 24,576 tokens: a stage of Qwen3-8B holds them if some is recomputed."""
    words = [
        *("data.max_prompt_length=1024", "data.max_response_length=2048", "data.train_batch_size=128"),
        *("data.train_files=a.parquet", "trainer.nnodes=1", "trainer.n_gpus_per_node=8"),
        *(f"{MODEL}path=Qwen3-8B", f"{MODEL}enable_gradient_checkpointing=True", f"{ACTOR}strategy=megatron"),
        *(f"{MEGATRON}tensor_model_parallel_size=2", f"{MEGATRON}pipeline_model_parallel_size=4"),
        *(f"{ACTOR}ppo_mini_batch_size=16", f"{ACTOR}ppo_micro_batch_size_per_gpu=8", "algorithm.adv_estimator=grpo"),
        *(f"{ROLLOUT}name=vllm", f"{ROLLOUT}tensor_model_parallel_size=2", f"{ROLLOUT}n=8"),
    ]
    recipe = tmp_path / "recipe.yaml"
    import_recipe("siirl", [], words, recipe, environment={})
    fits = CliRunner().invoke(app, ["plan", str(recipe)])
    assert fits.exit_code == 0, fits.output
    assert CliRunner().invoke(app, ["plan", str(recipe), "actor.megatron.recompute=none"]).exit_code == 1


def test_what_an_optimal_baseline_needs_is_always_computed() -> None:
    words = [
        "algorithm.adv_estimator=optimal_token_baseline",
        f"{ROLLOUT}n=4",
        f"{ACTOR}calculate_sum_pi_squared=True",
    ]
    conversion = convert_words("verl", *words)
    assert conversion.recipe["actor.advantage"] == "optimal_token_baseline"
    assert conversion[f"{ACTOR}calculate_sum_pi_squared"].outcome == "implied"


def test_the_critic_of_newer_releases_has_its_options_of_fsdp_in_a_section_as_the_actors() -> None:
    words = ["algorithm.adv_estimator=gae", f"{ACTOR}strategy=fsdp", "critic.strategy=fsdp", "critic.model.path=m"]
    switches = ["critic.fsdp.param_offload=True", "critic.fsdp.optimizer_offload=False", "critic.fsdp.fsdp_size=-1"]
    conversion = convert_words("verl", *words, *switches)
    assert conversion["critic.fsdp.param_offload"].to == "critic.offload.params"
    assert conversion["critic.fsdp.optimizer_offload"].outcome in ("mapped", "implied")
