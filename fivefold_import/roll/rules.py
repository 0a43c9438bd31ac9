"""ROLL, key by key: what becomes of each key that no other key decides about."""

from __future__ import annotations

from collections.abc import Mapping

from fivefold_import import megatron, reasons
from fivefold_import.algorithms import choose_loss, loss_by_name, option_of_loss
from fivefold_import.checkpoints import goes_on, kept
from fivefold_import.critic import NOT_TRAINED, of_critic, only_with_critic
from fivefold_import.distillation import COEFF, LAID_OUT, ONE_TEACHER, TEACHER_PATH, only_with_teacher
from fivefold_import.draft import Draft, Rule
from fivefold_import.rules import (
    checkpoint_every_steps,
    every_steps,
    for_each,
    if_on,
    implied,
    moments_on_host,
    off,
    offload_all,
    only,
    staleness,
    to,
    under,
    unknown,
    unsupported,
)
from fivefold_import.settings import one_path, trackers
from fivefold_import.values import DTYPE, LOSS_AGGREGATION, LR_SCHEDULE, flag, number, run_name, text, top_k, whole

TRAIN, INFER, REF, CRITIC = "actor_train.", "actor_infer.", "reference.", "critic."
CONFIG = "strategy_args.strategy_config."

MODEL_ARGS: Mapping[str, Rule] = {
    "dtype": to("actor.dtype", DTYPE),
    "model_type": only("trl", holds="models are causal language models"),
    "model_name_or_path": to("actor.path", text),
    "attn_implementation": implied(reasons.ATTENTION),
    "flash_attn": implied(reasons.ATTENTION),
    "device_map": implied("the layout says which devices hold a model"),
    "disable_gradient_checkpointing": implied(reasons.ONLY_TRAINING_RECOMPUTES),
    "gradient_checkpointing_use_reentrant": implied("Megatron-Core recomputes activations in its own way"),
    "moe_aux_loss_coef": to("actor.megatron.transformer.moe_aux_loss_coeff", number),
    "lora_rank": off(reasons.NO_LORA),
    "lora_target": unsupported(reasons.NO_LORA),
    "lora_*": implied(reasons.ONLY_LORA),
    "adapter_name_or_path": unsupported(reasons.NO_LORA),
    "freeze_module_prefix": off("all weights are trained"),
    "ulysses_size": only(1, holds="contexts are not split", otherwise="context parallelism is read from actor_train"),
    "*": unknown("the model"),
}

TRAINING_ARGS: Mapping[str, Rule] = {
    "learning_rate": to("actor.optimizer.lr", number),
    "weight_decay": to("actor.optimizer.weight_decay", number),
    "adam_beta1": to("actor.optimizer.beta1", number),
    "adam_beta2": to("actor.optimizer.beta2", number),
    "adam_epsilon": to("actor.optimizer.eps", number),
    "lr_scheduler_type": to("actor.optimizer.lr_scheduler_type", LR_SCHEDULE),
    "warmup_ratio": to("actor.optimizer.warmup_steps_proportion", number),
    "seed": implied(reasons.ONE_SEED),
    "data_seed": implied(reasons.ONE_SEED),
    "dataloader_num_workers": implied(reasons.READ_FIRST),
    "num_train_epochs": implied("max_steps is the length of training"),
    "per_device_train_batch_size": unsupported(f"{reasons.TOKEN_BUDGET}: set actor.mb_spec.max_tokens_per_mb"),
    "*": unknown("training"),
}

DATA_ARGS: Mapping[str, Rule] = {
    "file_name": one_path("train_dataset.path"),
    "messages": to("train_dataset.prompt_key", text),
    "prompt": to("train_dataset.prompt_key", text),
    "response": to("train_dataset.answer_key", text),
    "enable_thinking": unsupported(reasons.TEMPLATE),
    "tag": implied("rewards are told the row's data_source"),
    "rollout_dataloader_*": implied(reasons.READ_FIRST),
    "template": implied(reasons.TEMPLATE),
    "dataset_dir": implied("a path is used as it is written"),
    "dataset_type": implied("JSONL and parquet files are recognised by their suffix"),
    "preprocessing_num_workers": implied(reasons.READ_FIRST),
    "interleave_probs": implied("one data set is read, shuffled by the seed"),
    "domain_interleave_probs.*": only(
        1,
        holds="there is only this domain",
        otherwise="write the shares of the data sources as train_dataset.source_weights",
    ),
    "cache_path": implied(reasons.READ_FIRST),
    "*": unknown("the data"),
}

VALIDATION_DATA: Mapping[str, Rule] = {
    **DATA_ARGS,
    "file_name": one_path("valid_dataset.path"),
    "messages": to("valid_dataset.prompt_key", text),
    "prompt": to("valid_dataset.prompt_key", text),
    "response": to("valid_dataset.answer_key", text),
}

GENERATING_ARGS: Mapping[str, Rule] = {
    "temperature": to("gconfig.temperature", number),
    "top_p": to("gconfig.top_p", number),
    "top_k": to("gconfig.top_k", top_k),
    "num_return_sequences": implied("num_return_sequences_in_group overrides it"),
    "num_beams": only(1, holds="there is no beam search"),
    "do_sample": only(True, holds=reasons.ALWAYS_SAMPLED),
    "max_new_tokens": to("gconfig.max_new_tokens", whole),
    "*": unknown("sampling"),
}

FSDP: Mapping[str, Rule] = {
    "enable_mix_precision": implied("weights are bfloat16, master weights float32"),
    "fsdp_size": implied(reasons.STATES_SHARDED),
    "reshard_after_forward": implied("it matters in training only"),
    "wrap_policy.*": implied(reasons.LAYER_UNITS),
    "offload_policy": off(reasons.NO_OFFLOAD),
    "use_batched_model_update": implied(reasons.WEIGHTS_IN_BUCKETS),
    "param_dtype": implied("actor.dtype is the number format"),
    "reduce_dtype": implied(reasons.FLOAT32_REDUCTION),
}
"""Options of the strategy fsdp2_train."""

WORKER: Mapping[str, Rule] = {
    "infer_batch_size": implied(reasons.ONE_BUDGET),
    "worker_cls": unsupported("roles run Fivefold's workers"),
    "world_size": implied("it follows from the layout"),
    "device_mapping": implied("the role runs beside the actor"),
    "use_remove_padding": implied(reasons.ALWAYS_PACKED),
    "use_dynamic_batching_in_infer": implied(reasons.ONE_BUDGET),
    "max_tokens_per_microbatch_in_infer": implied(reasons.ONE_BUDGET),
    "sequence_length_round_in_*": implied("sequences are packed at their own lengths"),
    "sequence_packing_args.*": implied("sequences are packed by the cost of their attention, under one token budget"),
    "use_sequence_packing": implied(reasons.ALWAYS_PACKED),
    "backend_timeout": implied(reasons.TIMEOUT),
    "logits_in_fp32": implied("log-probabilities are computed in float32"),
    "apply_loss_scale": implied(reasons.GLOBAL_COUNTS),
    "offload_nccl": off(reasons.NO_OFFLOAD),
    "system_envs.*": unsupported(reasons.OWN_ENVIRONMENT),
    "data_args.*": implied("the actor's data are read"),
    "strategy_args.strategy_config": implied("the section is empty"),
    "model_update_frequency": only(1, holds="weights are updated every step", otherwise=reasons.SYNCHRONOUS),
    "*": unknown("a role"),
}

PURE, MIXED, WEIGHT = "is_pure_opd", "use_opd", "opd_kl_coef"
"""Switches of on-policy distillation, without rewards and beside them, and its weight beside them."""


def _mixed_with_rewards(draft: Draft, source: str) -> None:
    draft.mapped(source, COEFF, draft.read(WEIGHT, number, 1.0), "beside the rewards")


def _weight_of_teacher(draft: Draft, source: str) -> None:
    if draft.get(MIXED) is True:
        draft.mapped(source, COEFF, number(draft.get(source)))
    draft.implied(source, "without rewards, the teacher's weight is 1")


def _by_difficulty(draft: Draft, source: str) -> None:
    if draft.get(source) is True:
        note = "rows have the difficulty, a number from 0 to 1, in the column extra_info"
        draft.mapped(source, "actor.sample_weights.difficulty_key", "difficulty", note)
    draft.implied(source, "it is switched off")


TOP: Mapping[str, Rule] = {
    "exp_name": to("experiment_name", run_name),
    "seed": to("seed", whole),
    "pretrain": to("actor.path", text),
    "reward_pretrain": only_with_critic("critic.path", text),
    "num_gpus_per_node": to("cluster.n_gpus_per_node", whole),
    "num_nodes": to("cluster.n_nodes", whole),
    "output_dir": to("cluster.fileroot", text, reasons.OWN_OUTPUTS),
    "logging_dir": implied(reasons.OWN_OUTPUTS),
    "base_dir": implied(reasons.OWN_OUTPUTS),
    "rollout_dump_dir": implied(reasons.SAMPLES_FILE),
    "checkpoint_config.async_*": implied(reasons.IN_BACKGROUND),
    "checkpoint_config.*": implied(reasons.OWN_OUTPUTS),
    "track_with": trackers,
    "tracker_kwargs.*": implied(reasons.OWN_OUTPUTS),
    "rpc_timeout": to("scheduler.timeout_s", number),
    "max_steps": to("total_train_steps", whole),
    "save_steps": checkpoint_every_steps(),
    "eval_steps": every_steps("evaluator.freq_steps"),
    "validation.eval_steps": every_steps("evaluator.freq_steps"),
    "logging_steps": only(1, holds="every step is logged"),
    "max_ckpt_to_keep": kept,
    "resume_from_checkpoint": goes_on("save_steps"),
    "rollout_batch_size": to("train_dataset.batch_size", whole),
    "val_batch_size": implied(reasons.ALL_HELD_OUT),
    "val_n_sample": to("evaluator.n_samples", whole),
    "val_greedy": to("evaluator.greedy", flag),
    "val_prompt_length": to("valid_dataset.max_length", whole),
    "val_sequence_length": unsupported("held-out responses have gconfig.max_new_tokens, as those of training"),
    "prompt_length": to("train_dataset.max_length", whole),
    "num_return_sequences_in_group": to("gconfig.n_samples", whole),
    "ppo_epochs": to("actor.ppo_epochs", whole),
    "max_grad_norm": to("actor.optimizer.gradient_clipping", number),
    "entropy_loss_coef": to("actor.entropy_coeff", number),
    "loss_agg_mode": to("actor.loss_aggregation", LOSS_AGGREGATION),
    "reward_clip": to("actor.reward_clip", number, "rewards are clipped before they are normalised, not after"),
    "value_clip": implied(NOT_TRAINED),
    "lambd": implied(NOT_TRAINED),
    "gamma": implied(NOT_TRAINED),
    "critic_warmup": only_with_critic("critic.warmup_steps", whole),
    "advantage_clip": unsupported("advantages are not clipped: the loss is"),
    "importance_sampling": loss_by_name("token"),
    "use_policy_loss_type": loss_by_name("PPO"),
    "use_topr_loss": loss_by_name(False, name="topr"),
    "use_topr_neg_loss_coef": off("samples are weighted equally"),
    "postive_loss_coef": off("actor.positive_nll_coeff weighs no token by its advantage"),
    "rl_loss_coef": only(1, holds="the loss has the weight 1"),
    "max_len_mask": if_on("actor.mask_truncated", "it is switched off"),
    "difficulty_mask": off(reasons.SAMPLER),
    "difficulty_*_threshold": implied("only difficulty_mask reads this"),
    "error_max_len_clip": off(reasons.TRUNCATED_TRAINED),
    "error_max_len_threshold": implied("only error_max_len_clip reads this"),
    "difficulty_loss_weight": _by_difficulty,
    "length_loss_weight": if_on("actor.sample_weights.length", "it is switched off"),
    "add_len_reward": off(reasons.OWN_REWARD),
    "use_reward_scaling": off("rewards are scaled by a constant: set actor.reward_scaling"),
    "use_reward_norm": off("rewards are normalised as actor.reward_norm says"),
    "whiten_rewards": off(
        "rewards of tokens are not whitened; instead, actor.reward_norm normalises rewards over the batch or the group"
    ),
    "async_generation_ratio": staleness(),
    "generate_opt_level": implied(reasons.ENGINE_SCHEDULES),
    "is_num_return_sequences_expand": implied("each response is a request of its own"),
    "max_running_requests": to("rollout.max_batch_size", whole),
    "is_use_additional_prompts": off(reasons.FIXED_BATCH),
    "use_additional_prompts": off(reasons.FIXED_BATCH),
    "max_additional_running_prompts": implied("only is_use_additional_prompts reads this"),
    "enable_reference": implied("a reference is loaded if actor.kl_ctl is above 0"),
    "enable_old_logprobs_recompute": implied(reasons.OLD_LOGPROBS),
    "offload_backend": implied("what is offloaded goes to pinned host memory"),
    "is_offload_states": offload_all,
    "is_offload_*": off(reasons.NO_OFFLOAD),
    "model_update_buffer_size_mb": implied(reasons.WEIGHTS_IN_BUCKETS),
    "profiler_*": off(reasons.RECORDED),
    "model_download_type": unsupported("models are read from the Hugging Face hub, or from a folder"),
    "global_template": implied(reasons.TEMPLATE),
    "system_envs.*": unsupported(reasons.OWN_ENVIRONMENT),
    "hydra.*": implied(reasons.LAUNCHER),
    "defaults": unsupported("files that `defaults` names are not read: give them before this one"),
    **dict.fromkeys(
        ("enable_think", "action_sep", "use_turn_scores", "max_actions_per_traj", "reward_normalization.*", "render_*"),
        unsupported(reasons.NO_AGENTS),
    ),
    "enable_response_mask": implied("the loss is over responses only"),
    PURE: off("it is converted with the advantages"),
    "pure_opd_pipeline_type": only("rlvr", holds="each prompt gets one response", otherwise=reasons.NO_AGENTS),
    **only_with_teacher(
        lambda draft: True in (draft.get(PURE), draft.get(MIXED)),
        {
            MIXED: _mixed_with_rewards,
            WEIGHT: _weight_of_teacher,
            "teacher.model_args.model_name_or_path": to(TEACHER_PATH, text),
            "teacher.model_args.dtype": to("teacher.dtype", DTYPE),
            "teacher.*.model_args.model_name_or_path": unsupported(ONE_TEACHER),
            "teacher.*": implied(LAID_OUT),
        },
    ),
    "reward.*": unsupported(reasons.NO_REWARD_MODEL),
    "reward_model.*": unsupported(reasons.NO_REWARD_MODEL),
    "rewards.*": implied(reasons.REWARDS_TOGETHER),
    "validation.generating_args.num_return_sequences": to("evaluator.n_samples", whole),
    "validation.generating_args.num_beams": GENERATING_ARGS["num_beams"],
    "validation.*": unknown("validation"),
    "*env*": unsupported(reasons.NO_AGENTS),
    "vlm_filter.*": implied(reasons.NO_MULTIMODAL),
    "dataset_filter.*": unsupported("rows are not filtered: prepare the file"),
}

ENGINE_OPTIONS: Mapping[str, Rule] = {
    "max_num_seqs": to("rollout.max_batch_size", whole),
    "gpu_memory_utilization": to("rollout.memory_fraction", number),
    "mem_fraction_static": to("rollout.memory_fraction", number),
    "load_format": implied(reasons.WEIGHTS_IN_BUCKETS),
    "sleep_level": implied(reasons.IN_TURN),
    "*": unsupported(reasons.NO_ENGINE_OPTIONS),
}

MODEL_AS_ACTOR: Mapping[str, Rule] = {
    **MODEL_ARGS,
    "dtype": implied("the actor's value holds"),
    "model_name_or_path": implied("the actor's value holds"),
    "moe_aux_loss_coef": implied("only training adds the auxiliary loss"),
}


def _variant(draft: Draft, source: str) -> None:
    """Convert the variant of the policy gradient; `vanilla` has no ratios, `tis` truncates them to [0, 1]."""
    variant = str(draft.get(source))
    match variant:
        case "tis":
            draft.mapped(source, "actor.loss", "cispo", "with weights in [0, 1]")
        case "ppo":
            draft.implied(source, reasons.CLIPPED_LOSS)
        case _:
            choose_loss(draft, source, "pg" if variant == "vanilla" else variant)


CRITIC_RULES: Mapping[str, Rule] = of_critic(
    {
        **WORKER,
        **under("model_args.", {**MODEL_ARGS, "model_name_or_path": to("critic.path", text)}),
        "model_args.model_type": implied("a critic has a value head in place of the output layer"),
        **for_each((CONFIG, CONFIG + "additional_configs."), megatron.TRANSFORMER),
        **under("training_args.", TRAINING_ARGS),
        **under(CONFIG, FSDP),
        CONFIG + "overlap_grad_reduce": megatron.DDP["overlap_grad_reduce"],
    }
)


def rules_of_trainer(section: str) -> dict[str, Rule]:
    """Return the rules of the section of a model that is trained."""
    return {
        **under(section, WORKER),
        **under(section + "model_args.", MODEL_ARGS),
        **for_each((section + CONFIG, section + CONFIG + "additional_configs."), megatron.TRANSFORMER),
        **under(section + "training_args.", TRAINING_ARGS),
        **under(section + "data_args.", DATA_ARGS),
        **under(section + CONFIG, FSDP),
        section + CONFIG + "reshard_after_forward": to("actor.fsdp.reshard_after_forward", flag),
        section + CONFIG + "reduce_dtype": to("actor.fsdp.mp_policy.reduce_dtype", DTYPE),
        section + CONFIG + "offload_policy": moments_on_host,
        section + CONFIG + "overlap_grad_reduce": megatron.DDP["overlap_grad_reduce"],
    }


RULES: Mapping[str, Rule] = {
    **TOP,
    **under(CRITIC, CRITIC_RULES),
    **for_each((INFER, REF), WORKER),
    **rules_of_trainer(TRAIN),
    TRAIN + "pg_variant": _variant,
    **{
        f"{TRAIN}topr_{sign}_weight": option_of_loss(f"{sign}_weight", "topr", TRAIN + "pg_variant", "topr")
        for sign in ("positive", "negative")
    },
    TRAIN + "kimi15_tau": option_of_loss("tau", "kimi", TRAIN + "pg_variant", "kimi15"),
    **under(INFER + CONFIG, ENGINE_OPTIONS),
    **for_each((INFER, REF), under("model_args.", MODEL_AS_ACTOR)),
    **under(REF + CONFIG, {"*": implied(megatron.AS_ACTOR)}),
    **under(INFER + "generating_args.", GENERATING_ARGS),
    **under("validation.data_args.", VALIDATION_DATA),
}
