"""verl, key by key: what becomes of each key that no other key decides about.

The keys of the model, the actor and the reference are in `actor_rules`; keys that need other keys are in `tree`.
"""

from __future__ import annotations

from collections.abc import Mapping

from fivefold_import import corrections, profiling, reasons
from fivefold_import.checkpoints import goes_on, kept, only_newest
from fivefold_import.critic import has_critic, only_with_critic
from fivefold_import.draft import Draft, Rule
from fivefold_import.rules import (
    checkpoint_every_steps,
    every_steps,
    for_each,
    if_on,
    implied,
    off,
    only,
    staleness,
    to,
    under,
    unknown,
    unsupported,
)
from fivefold_import.settings import one_path, trackers
from fivefold_import.values import DTYPE, flag, number, one_of, run_name, text, top_k, whole
from fivefold_import.verl.actor_rules import (
    ACTOR,
    ACTOR_RULES,
    MODEL,
    MODEL_RULES,
    REF,
    REFERENCE_RULES,
    loss_options,
)
from fivefold_import.verl.asynchronous import ROLLOUT_RULES as ROLLOUT_KEYS
from fivefold_import.verl.critic_rules import CRITIC, CRITIC_RULES
from fivefold_import.verl.distillation import DISTILLATION_RULES

ROLLOUT = "actor_rollout_ref.rollout."

REWARD_KWARGS = f"{reasons.OWN_REWARD}; give reward.kwargs"
RAY = "Ray is started or joined as `scheduler` says"


def _length(of: str, to_: str) -> Rule:
    """Make a length of the rollout implied if it is that of the data, as by default; another one is unsupported."""

    def rule(draft: Draft, source: str) -> None:
        if draft.get(source) == draft.get(of):
            draft.implied(source, f"the length follows from {to_}")
        else:
            draft.unsupported(source, f"the length follows from {to_}, which {of} sets to {draft.get(of)}")

    return rule


ROLLOUT_RULES: Mapping[str, Rule] = {
    "n": to("gconfig.n_samples", whole),
    "temperature": to("gconfig.temperature", number),
    "top_p": to("gconfig.top_p", number),
    "top_k": to("gconfig.top_k", top_k),
    "do_sample": only(True, holds=reasons.ALWAYS_SAMPLED),
    "dtype": to("rollout.dtype", DTYPE),
    "max_num_seqs": to("rollout.max_batch_size", whole),
    "gpu_memory_utilization": to("rollout.memory_fraction", number),
    "prompt_length": _length("data.max_prompt_length", "train_dataset.max_length"),
    "response_length": _length("data.max_response_length", "gconfig.max_new_tokens"),
    "max_model_len": implied(reasons.LENGTHS),
    "ignore_eos": off(reasons.END_TOKEN),
    "seed": implied(reasons.ONE_SEED),
    "free_cache_engine": implied(reasons.IN_TURN),
    "calculate_log_probs": implied(reasons.KEPT_LOGPROBS),
    "load_format": implied(reasons.WEIGHTS_IN_BUCKETS),
    "layered_summon": implied(reasons.WEIGHTS_IN_BUCKETS),
    "checkpoint_engine.*": implied(reasons.WEIGHTS_IN_BUCKETS),
    "skip_tokenizer_init": implied(reasons.TOKEN_IDS),
    "trust_remote_code": off(reasons.NO_REMOTE_CODE),
    "mode": implied(reasons.ENGINE_SCHEDULES),
    "val_kwargs.n": to("evaluator.n_samples", whole),
    "val_kwargs.*": unsupported("evaluation takes other sampling options from gconfig"),
    "log_prob_*": implied(reasons.ONE_BUDGET),
    "micro_batch_size": implied(reasons.ONE_BUDGET),
    "over_sample_rate": off("each prompt is sampled gconfig.n_samples times"),
    "multi_turn.*": off(reasons.NO_AGENTS),
    "agent.*": off(reasons.NO_AGENTS),
    "expert_parallel_size": only(1, holds="experts are not spread over ranks", otherwise=reasons.ROLLOUT_DEGREES),
    "data_parallel_size": only(1, holds="replicas are counted from the devices", otherwise="replicas are independent"),
    "moe_tensor_parallel_size": unsupported(reasons.ROLLOUT_DEGREES),
    "nnodes": only(0, holds="the rollout shares the actor's devices", otherwise="rollout.backend lays out the rollout"),
    "enable_rollout_routing_replay": off(reasons.NO_ROUTER_REPLAY),
    "limit_images": implied(reasons.NO_MULTIMODAL),
    "layer_name_map.*": implied("the bridge maps every weight's name"),
    "use_fire_sampling": off(reasons.SAMPLING),
    "profiler*": implied(reasons.RECORDED),
    "trace*": off(reasons.SAMPLES_FILE),
    "*": unsupported(reasons.NO_ENGINE_OPTIONS),
}

DATA_RULES: Mapping[str, Rule] = {
    "train_files": one_path("train_dataset.path"),
    "val_files": one_path("valid_dataset.path"),
    "train_batch_size": to("train_dataset.batch_size", whole),
    "val_batch_size": implied(reasons.ALL_HELD_OUT),
    "gen_batch_size": unsupported(reasons.FIXED_BATCH),
    "max_prompt_length": to("train_dataset.max_length", whole),
    "max_response_length": to("gconfig.max_new_tokens", whole),
    "prompt_key": to("train_dataset.prompt_key", text),
    "shuffle": to("train_dataset.shuffle", flag),
    "validation_shuffle": implied(reasons.ALL_HELD_OUT),
    "seed": to("seed", whole),
    "train_max_samples": off("give a smaller file, or set train_dataset.limit"),
    "val_max_samples": off("give a smaller file, or set valid_dataset.limit"),
    "filter_overlong_prompt*": implied(reasons.TOO_LONG),
    "truncation": only("error", holds=reasons.TOO_LONG, otherwise=reasons.NOT_CUT),
    "tokenizer": to("tokenizer_path", text),
    "reward_fn_key": only("data_source", holds="rewards are told the row's data_source"),
    "return_*": implied("rewards are handed texts, and the row's extra_info"),
    "custom_cls.*": unsupported("data sets are read by columns"),
    "sampler.*": unsupported(reasons.SAMPLER),
    "image_*": implied(reasons.NO_MULTIMODAL),
    "video_*": implied(reasons.NO_MULTIMODAL),
    "audio_*": implied(reasons.NO_MULTIMODAL),
    "processor.*": implied(reasons.NO_MULTIMODAL),
    "dataset_type": only("llm", holds="data are texts", otherwise=reasons.NO_MULTIMODAL),
    "apply_chat_template_kwargs.*": unsupported(reasons.TEMPLATE),
    "trust_remote_code": off(reasons.NO_REMOTE_CODE),
    "auto_repeat": implied("the data begin again when an epoch ends"),
    "num_loader_workers": implied(reasons.READ_FIRST),
    "dataloader_num_workers": implied(reasons.READ_FIRST),
    "preprocessing_*": implied(reasons.READ_FIRST),
    "force_on_the_fly": implied(reasons.READ_FIRST),
    "use_shm": implied("data are read from the file itself"),
    "tool_config_path": off(reasons.NO_AGENTS),
    "function_tool_path": off(reasons.NO_AGENTS),
    "*": unknown("the data"),
}


def _rounds(draft: Draft, key: str) -> None:
    """Convert the most batches that a step samples; 0 and negative numbers set no limit."""
    most = whole(draft.get(key))
    if draft.get(key.replace("max_num_gen_batches", "enable")) is True:
        draft.mapped(key, "actor.dynamic_sampling_max_rounds", most if 0 < most <= 1000 else 1000)
    draft.implied(key, "dynamic sampling is switched off")


ROLLOUT_CORRECTION: Mapping[str, Rule] = {
    "rollout_is": corrections.weights,
    "rollout_is_threshold": corrections.cap_of_weights,
    "rollout_rs": corrections.masks,
    "rollout_rs_threshold": corrections.bounds_of_mask,
    "rollout_rs_threshold_lower": corrections.lower_bound_of_mask,
    "rollout_token_veto_threshold": corrections.veto,
    "rollout_is_batch_normalize": off("weights are not normalised over the batch"),
    "bypass_mode": corrections.bypass,
    "loss_type": corrections.loss_of_bypass,
    "rollout_correction.*": unknown("the correction"),
    "rollout_is*": unknown("the correction"),
}
"""verl's correction for the mismatch of rollout and trainer: `algorithm.rollout_correction`, or without the section."""

FILTRATION = one_of(pow="power", max_min="max_min", max_random="max_random")


def _filtration(draft: Draft, key: str) -> None:
    """Convert PF-PPO, which verl has with GAE alone."""
    section, weights = "algorithm.pf_ppo.", "actor.sample_weights."
    if draft.get("algorithm.use_pf_ppo") is True and has_critic(draft):
        rule = draft.read(section + "reweight_method", FILTRATION, "pow")
        draft.recipe[weights + "reward"] = rule
        for source in ("algorithm.use_pf_ppo", section + "reweight_method"):
            draft.mapped(source, weights + "reward", rule, "as often as samples would be drawn; the critic has all")
        if rule == "power":
            draft.recipe[weights + "reward_power"] = draft.read(section + "weight_pow", number, 2.0)
            draft.mapped(section + "weight_pow", weights + "reward_power", draft.recipe[weights + "reward_power"])
    draft.implied(key, "samples are not filtered, or not by this")


ALGORITHM_RULES: Mapping[str, Rule] = {
    "gamma": implied(reasons.SAME_ADVANTAGE),
    "lam": implied(reasons.SAME_ADVANTAGE),
    "filter_groups.enable": if_on("actor.dynamic_sampling", "it is switched off"),
    "filter_groups.max_num_gen_batches": _rounds,
    "filter_groups.metric": implied("groups are compared by their rewards"),
    "filter_groups.*": unknown("dynamic sampling"),
    "use_pf_ppo": _filtration,
    "pf_ppo.*": _filtration,
    **under("rollout_correction.", ROLLOUT_CORRECTION),
    **{key: rule for key, rule in ROLLOUT_CORRECTION.items() if key not in ("bypass_mode", "loss_type")},
    "algorithm_name": implied("adv_estimator is what counts"),
    "workflow_type": only(
        "default", "DEFAULT", holds="a step is prompt, response and reward", otherwise=reasons.NO_AGENTS
    ),
    "weight_factor_in_cpgd": implied("only the CPGD estimator reads this"),
    "share_reward_in_agent": implied(reasons.NO_AGENTS),
    "*": unknown("the algorithm"),
}


OVERLONG: Mapping[str, Rule] = {
    "enable": if_on("actor.overlong_reward_penalty", "it is switched off"),
    "len": to("actor.overlong_tokens", whole),
    "penalty_factor": to("actor.overlong_penalty_factor", number),
    "*": implied("the metrics have the penalty"),
}
"""DAPO's punishment of over-long responses."""
OVERLONG_SECTIONS = (
    "reward_model.overlong_buffer.",
    "reward_model.reward_kwargs.overlong_buffer_cfg.",
    "reward.reward_kwargs.overlong_buffer_cfg.",
)
"""Where releases have it."""


def option_of_reward_model(switch: str) -> Rule:
    """Make an option of the reward model implied, unless the key `switch` asks for one."""

    def rule(draft: Draft, source: str) -> None:
        if draft.get(switch) is True:
            draft.unsupported(source, reasons.NO_REWARD_MODEL)
        else:
            draft.implied(source, "only a reward model reads this")

    return rule


def _own_function(draft: Draft, source: str) -> None:
    """Convert the file of a reward function of the user's own, which is called as verl calls it."""
    path = draft.get(source)
    if path in (None, ""):
        return draft.implied(source, "it is switched off")
    if not str(path).endswith(".py"):
        return draft.unsupported(source, "write it as reward.fn=module:function")
    function = draft.get(source.removesuffix("path") + "name", "compute_score")
    return draft.mapped(source, "reward.fn", f"{path}:{function}", "it is called with verl's argument names")


def _own_arguments(draft: Draft, source: str) -> None:
    section, _, name = source.partition("reward_kwargs.")
    if draft.writes(f"{section}path"):
        draft.mapped(source, f"reward.kwargs.{name}", draft.get(source))
    draft.implied(source, "only a function of the user's own reads this")


OWN_FUNCTION: Mapping[str, Rule] = {
    "path": _own_function,
    "name": implied("it names a function of custom_reward_function.path"),
    "reward_kwargs": implied("the section is empty"),
    "reward_kwargs.*": _own_arguments,
}
"""A reward function of the user's own."""

ENABLED = "reward_model.enable"
"""The switch of a reward model with a score head; that below `reward.reward_model` is of one that writes judgements."""


def _scored_by_model(draft: Draft, source: str) -> None:
    """Convert the switch of a reward model, whose score then takes the place of a function."""
    path = "reward_model.model.path"
    if draft.get(source) is not True:
        draft.implied(source, "it is switched off")
    elif draft.writes(path):
        draft.mapped(source, "reward.fn", "model", "the reward is the model's score alone")
    else:
        draft.unsupported(source, f"set reward.fn=model and reward.model.path: {path} is not written")


def _of_score_model(rule: Rule) -> Rule:
    """Apply a rule to an option of a reward model with a score head; without one, the option is implied."""

    def of(draft: Draft, source: str) -> None:
        if draft.get(ENABLED) is True:
            rule(draft, source)
        else:
            draft.implied(source, "only a reward model reads this")

    return of


SCORE_MODEL: Mapping[str, Rule] = {
    name: _of_score_model(rule)
    for name, rule in {
        "model.path": to("reward.model.path", text),
        "model.input_tokenizer": unsupported(
            "the reward model reads the actor's tokens, so it must have the actor's tokenizer"
        ),
        "megatron.param_offload": to("reward.model.offload", flag),
        "model.fsdp_config.param_offload": to("reward.model.offload", flag),
        "forward_max_token_len_per_gpu": to("reward.model.mb_spec.max_tokens_per_mb", whole),
        "micro_batch_size*": implied(reasons.TOKEN_BUDGET),
        "use_dynamic_bsz": implied(reasons.TOKEN_BUDGET),
        "model.use_remove_padding": implied(reasons.ALWAYS_PACKED),
        "max_length": implied("completions that are too long for the model are an error before the run"),
        "strategy": implied("the reward model is laid out as the actor: change reward.model.backend"),
        "megatron.*": unsupported("the section reward.model has the reward model's keys (docs/rewards.md)"),
        "*": unsupported("the section reward.model has the reward model's keys (docs/rewards.md)"),
    }.items()
}

REWARD_RULES: Mapping[str, Rule] = {
    ENABLED: _scored_by_model,
    "reward_model.reward_manager": only("naive", holds="each response has one reward", otherwise=reasons.OWN_REWARD),
    "reward_model.launch_reward_fn_async": implied(reasons.REWARDS_TOGETHER),
    "reward_model.reward_kwargs.*": off(REWARD_KWARGS),
    **for_each(OVERLONG_SECTIONS, OVERLONG),
    **under("reward_model.", SCORE_MODEL),
    "reward.reward_model.enable": off(reasons.NO_REWARD_MODEL),
    "reward.reward_model.*": option_of_reward_model("reward.reward_model.enable"),
    "reward.reward_manager.name": only("naive", holds="each response has one reward", otherwise=reasons.OWN_REWARD),
    "reward.num_workers": implied(reasons.REWARDS_TOGETHER),
    "reward.reward_kwargs.*": off(REWARD_KWARGS),
    **for_each(("reward.custom_reward_function.", "custom_reward_function."), OWN_FUNCTION),
    "sandbox_fusion.*": unsupported("reward.fn=code runs programs in a sandbox of its own, on the driver's machine"),
    "reward.*": unsupported(reasons.OWN_REWARD),
}


def _resumed_path(draft: Draft, source: str) -> None:
    """Convert the checkpoint of verl that a run starts from, if `resume_mode` asks for it."""
    if draft.get("trainer.resume_mode") == "resume_path":
        draft.unsupported(source, reasons.OTHER_CHECKPOINTS)
    draft.implied(source, "only resume_mode=resume_path reads this")


TRAINER_RULES: Mapping[str, Rule] = {
    "project_name": to("experiment_name", run_name),
    "experiment_name": to("trial_name", run_name),
    "default_local_dir": to("cluster.fileroot", text, reasons.OWN_OUTPUTS),
    "default_hdfs_dir": unsupported(reasons.OWN_OUTPUTS),
    "rollout_data_dir": unsupported(reasons.OWN_OUTPUTS),
    "validation_data_dir": unsupported(reasons.OWN_OUTPUTS),
    "nnodes": to("cluster.n_nodes", whole),
    "n_gpus_per_node": to("cluster.n_gpus_per_node", whole),
    "total_epochs": to("total_train_epochs", whole),
    "total_training_steps": to("total_train_steps", whole),
    "save_freq": checkpoint_every_steps(),
    "test_freq": every_steps("evaluator.freq_steps"),
    "val_before_train": only(True, holds=reasons.EVALUATES_FIRST),
    "val_only": off("to evaluate only, use `fivefold eval`"),
    "logger": trackers,
    "log_val_generations": off("generations of training steps are logged (stats.n_logged_samples), held-out ones not"),
    "val_generations_to_log_to_wandb": off(reasons.METRICS),
    "resume_mode": goes_on("trainer.save_freq"),
    "resume_from_path": _resumed_path,
    "critic_warmup": only_with_critic("critic.warmup_steps", whole),
    "max_actor_ckpt_to_keep": kept,
    "max_critic_ckpt_to_keep": implied("a checkpoint holds the whole run, the critic too"),
    "remove_previous_ckpt_in_save": only_newest,
    "del_local_ckpt_after_load": off("a checkpoint is deleted only when newer ones are complete"),
    "balance_batch": implied(reasons.BALANCED),
    "ray_wait_register_center_timeout": implied(reasons.TIMEOUT),
    "device": only("cuda", "cpu", holds="training runs on CUDA GPUs and on CPUs"),
    "seed": to("seed", whole),
    "esi_redundant_time": off("recover.save_before says by when a run has saved and ended, from its start"),
    "use_legacy_worker_impl": implied(reasons.OWN_CODE),
    "use_v1": implied(reasons.OWN_CODE),
    "should_*": implied("it follows from saver and stats"),
    "profile_steps": profiling.steps,
    "profile*": implied(reasons.RECORDED),
    "*": unknown("the trainer"),
}

RULES: Mapping[str, Rule] = {
    **under("data.", DATA_RULES),
    **under(MODEL, MODEL_RULES),
    **under(ACTOR, ACTOR_RULES),
    **loss_options(ACTOR),
    **under(REF, REFERENCE_RULES),
    **under(ROLLOUT, ROLLOUT_RULES),
    "actor_rollout_ref.hybrid_engine": only(
        True, holds="rollout and actor share devices", otherwise="rollout.colocate says whether they share devices"
    ),
    "async_training.staleness_threshold": staleness(),
    "async_training.partial_rollout": implied(reasons.GOES_ON),
    "async_training.trigger_parameter_sync_step": only(1, holds="weights are updated after every step"),
    "async_training.require_batches": only(1, holds="each step trains on train_dataset.batch_size prompts"),
    **ROLLOUT_KEYS,
    "async_training.compute_prox_log_prob": implied(reasons.OLD_LOGPROBS),
    "async_training.*": unknown("asynchronous training"),
    "actor_rollout_ref.nccl_timeout": implied(reasons.TIMEOUT),
    **under(CRITIC, CRITIC_RULES),
    **under("algorithm.", ALGORITHM_RULES),
    **REWARD_RULES,
    **under("trainer.", TRAINER_RULES),
    **for_each(("global_profiler.", "profiler."), profiling.PROFILER),
    "ray_kwargs.*": unsupported(RAY),
    "ray_init.*": unsupported(RAY),
    **DISTILLATION_RULES,
    "transfer_queue.*": off("samples stay in the driver"),
    "--config-*": implied("it names verl's own defaults, which are known here"),
    "model_engine": implied("it follows from the actor's strategy"),
    "hydra.*": implied(reasons.LAUNCHER),
}
