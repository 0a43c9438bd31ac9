"""AReaL, key by key: what each becomes, where one key alone decides it."""

from __future__ import annotations

from collections.abc import Mapping

from fivefold.importing import megatron
from fivefold.importing.draft import (
    Convert,
    Draft,
    Rule,
    flag,
    for_each,
    implied,
    number,
    off,
    one_of,
    only,
    text,
    to,
    under,
    unsupported,
    whole,
)
from fivefold.importing.meanings import (
    DTYPE,
    NO_AGENTS,
    NO_CRITIC,
    NO_ENGINE_OPTIONS,
    NO_LORA,
    NO_OFFLOAD,
    NO_PROFILER,
    NO_RESUME,
    NOT_FSDP,
    ONE_BUDGET,
    OWN_BRIDGE,
    OWN_OUTPUTS,
    SCHEDULE,
    SYNCHRONOUS,
    WHOLE_IN_PASSES,
    run_name,
    top_k,
)

RAY_PLACES = "Ray places one worker on each device"
IN_STEPS = "counted in steps: set freq_steps"
OWN_LOGS = "metrics go to the console, TensorBoard and metrics.jsonl"
NO_PENALTY = "a response's reward is what reward.fn returns"


def texts(value: object) -> list[str]:
    """A text, or a list of them."""
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]


def whole_numbers(value: object) -> list[int]:
    """A list of whole numbers."""
    return [whole(item) for item in value] if isinstance(value, list) else [whole(value)]


NATIVE: Mapping[str, Convert] = {
    "experiment_name": run_name,
    "trial_name": run_name,
    "seed": whole,
    "tokenizer_path": text,
    "total_train_epochs": whole,
    "total_train_steps": whole,
    "cluster.n_nodes": whole,
    "cluster.n_gpus_per_node": whole,
    "cluster.fileroot": text,
    "actor.path": text,
    "actor.dtype": DTYPE,
    "actor.init_from_scratch": flag,
    "actor.mb_spec.max_tokens_per_mb": whole,
    "actor.mb_spec.n_mbs": whole,
    "actor.optimizer.lr": number,
    "actor.optimizer.weight_decay": number,
    "actor.optimizer.beta1": number,
    "actor.optimizer.beta2": number,
    "actor.optimizer.eps": number,
    "actor.optimizer.lr_scheduler_type": SCHEDULE,
    "actor.optimizer.warmup_steps_proportion": number,
    "actor.optimizer.min_lr_ratio": number,
    "actor.optimizer.gradient_clipping": number,
    "actor.ppo_n_minibatches": whole,
    "actor.eps_clip": number,
    "actor.eps_clip_higher": number,
    "actor.c_clip": number,
    "actor.kl_ctl": number,
    "actor.kl_estimator": one_of(k1="k1", k2="k2", k3="k3"),
    "actor.recompute_logprob": flag,
    "actor.reward_scaling": number,
    "actor.reward_bias": number,
    "actor.reward_clip": number,
    "actor.megatron.use_deterministic_algorithms": flag,
    "actor.megatron.virtual_pipeline_parallel_size": whole,
    "ref.path": text,
    "gconfig.n_samples": whole,
    "gconfig.max_new_tokens": whole,
    "gconfig.min_new_tokens": whole,
    "gconfig.greedy": flag,
    "gconfig.temperature": number,
    "gconfig.top_p": number,
    "gconfig.top_k": top_k,
    "gconfig.stop_token_ids": whole_numbers,
    "gconfig.stop": texts,
    **{
        f"{section}.{name}": convert
        for section in ("train_dataset", "valid_dataset")
        for name, convert in (("path", text), ("split", text), ("max_length", whole))
    },
    "train_dataset.batch_size": whole,
    "train_dataset.shuffle": flag,
    "saver.freq_steps": whole,
    "evaluator.freq_steps": whole,
}
"""Keys that mean the same in both, by the conversion that checks their values."""


def _scheduler(draft: Draft, key: str) -> None:
    value = draft.get(key)
    if value in ("local", "ray"):
        draft.mapped(key, key, value)
    else:
        reason = f"jobs are not submitted to {value}: start Ray there, and join it with scheduler.type=ray"
        draft.unsupported(key, reason)


ENGINE: Mapping[str, Rule] = {
    "attn_impl": implied(megatron.KERNELS),
    "use_kernels": implied(megatron.KERNELS),
    "disable_dropout": only(True, holds="no dropout", otherwise="models are trained without dropout"),
    "offload": off(NO_OFFLOAD),
    "pad_to_maximum": off("sequences are packed at their own lengths"),
    "is_critic": off(NO_CRITIC),
    "grad_reduce_dtype": only("float32", holds="float32", otherwise="gradients are always reduced in float32"),
    "optimizer_dtype": only("float32", holds="float32", otherwise="moments and master weights are float32"),
    "weight_update_mode": implied("weights go from actor to rollout in buckets"),
    "use_lora": off(NO_LORA),
    "lora_*": implied("only LoRA reads it"),
    "peft_type": implied("only LoRA reads it"),
    "target_modules": implied("only LoRA reads it"),
    "enable_tree_training": off("prompts of a group are not shared in training"),
    "mb_spec.granularity": only(1, holds="one sequence", otherwise="sequences are packed one by one"),
    "mb_spec.n_mbs_divisor": only(1, holds="one", otherwise="the pipeline says what micro-batches must divide by"),
    "mb_spec.packing_algorithm": implied("packing balances the cost of attention"),
    "scheduling_spec": implied(RAY_PLACES),
    "scheduling_spec.*": implied(RAY_PLACES),
    "scheduling_spec.*.env_vars.*": unsupported("set environment variables in the shell that starts the run"),
    "scheduling_strategy": implied("roles stand apart where the cluster has room"),
    "fsdp.wrap_policy*": implied(WHOLE_IN_PASSES),
    "fsdp.offload_params": off(NO_OFFLOAD),
    "fsdp.*": unsupported(NOT_FSDP),
    "archon.*": unsupported("an option of Archon that training on Megatron-Core has no counterpart of"),
    "log_level": implied("workers log below the run's folder"),
    "request_timeout": implied("scheduler.timeout_s bounds every phase"),
    "setup_timeout": implied("scheduler.timeout_s bounds every phase"),
    "admin_api_key": implied("roles are Ray actors, without a server"),
    "_version": implied("names the framework's own code"),
}
"""Of actor and reference alike."""

MEGATRON: Mapping[str, Rule] = {
    **megatron.OVERRIDES,
    **under("ddp.", megatron.DDP),
    "ddp.check_for_nan_in_grad": implied("a step whose gradient is not finite is skipped, and explained"),
    "ddp.overlap_param_gather": off("parameters are gathered before they are needed"),
    "ddp.align_param_gather": off("parameters are gathered before they are needed"),
    "ddp.bucket_size": to("actor.megatron.ddp.bucket_size", whole),
    "ddp.fp8_param_gather": off("training runs in bfloat16 or float32"),
    "wrap_with_ddp": only(True, holds="always", otherwise="gradients are always kept by Megatron-Core's DDP"),
    "use_torch_fsdp2": off(WHOLE_IN_PASSES),
    "use_custom_fsdp": off(WHOLE_IN_PASSES),
    "overlap_param_gather_with_optimizer_step": off("parameters are gathered before they are needed"),
    "use_precision_aware_optimizer": off("moments and master weights are float32"),
    **dict.fromkeys(
        ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"),
        only("float32", holds="float32", otherwise="gradients, moments and master weights are float32"),
    ),
    "async_save": off("weights are written between steps"),
    "use_checkpoint_opt_param_scheduler": implied("nothing is resumed"),
    "bridge_type": implied(OWN_BRIDGE),
    "use_mbridge_save": implied(OWN_BRIDGE),
    "use_bridge_for_update_weights": implied(OWN_BRIDGE),
}

ACTOR: Mapping[str, Rule] = {
    **ENGINE,
    **under("megatron.", MEGATRON),
    "optimizer.type": only("adam", holds="AdamW", otherwise="the optimizer is AdamW"),
    "optimizer.*loss_scale*": implied("bfloat16 and float32 need no loss scale"),
    "optimizer.hysteresis": implied("bfloat16 and float32 need no loss scale"),
    "optimizer.offload": off(NO_OFFLOAD),
    "m2_threshold": unsupported("tokens are not masked by their second moment"),
    "overlong_reward_penalty": off(NO_PENALTY),
    "overlong_*": implied("only overlong_reward_penalty reads it"),
    "dynamic_sampling": off("groups without signal keep their place in the batch; their advantage is 0"),
    "mask_no_eos_with_zero": off("a response that is cut off is trained like any other"),
    "mask_too_long": off("a response that is cut off is trained like any other"),
    "discount": implied("without a critic, every token of a response has its advantage"),
    "gae_lambda": implied("without a critic, every token of a response has its advantage"),
    "use_sapo_loss": off("the loss is PPO's clipped one"),
    "sapo_*": implied("only use_sapo_loss reads it"),
    "use_decoupled_loss": off("old log-probabilities are one policy's: the trainer's, before the step"),
    "behav*_imp_weight_*": unsupported("samples are not weighted by the mismatch of rollout and trainer"),
    "rejection_sampling.*": unsupported("samples are not weighted by the mismatch of rollout and trainer"),
    "prox_logp_method": only("recompute", holds="recomputed", otherwise="old log-probabilities are computed"),
    "importance_sampling_level": only("token", holds="ratios of tokens", otherwise="the loss has ratios of tokens"),
    "colocated": only(True, False, holds="the layout says which roles share devices", otherwise=SYNCHRONOUS),
    "colocated_weight_path": implied("weights go from actor to rollout in buckets"),
    "*icepop*": unsupported("samples are not weighted by the mismatch of rollout and trainer"),
    "log_agent_stats": off(NO_AGENTS),
    "log_agent_stats_keys": implied(NO_AGENTS),
    "entropy_coeff": to("actor.entropy_coeff", number),
    "temperature": unsupported("the loss takes gconfig.temperature"),
    "max_new_tokens": unsupported("gconfig.max_new_tokens rules"),
}

ROLLOUT: Mapping[str, Rule] = {
    "max_concurrent_rollouts": implied("a replica decodes up to rollout.max_batch_size sequences at one time"),
    "queue_size": off(SYNCHRONOUS),
    "consumer_batch_size": unsupported("each step samples train_dataset.batch_size prompts"),
    "max_head_offpolicyness": off(SYNCHRONOUS),
    "enable_rollout_tracing": off("samples of each step are written to samples.jsonl"),
    "check_trajectory_format": implied("samples are typed"),
    "dump_to_file": implied("samples of each step are written to samples.jsonl"),
    "pause_grace_period": implied(SYNCHRONOUS),
    "request_retries": implied("an error ends the run; nothing is tried again"),
    "use_lora": off(NO_LORA),
    "lora_name": implied("only LoRA reads it"),
    "return_routed_experts": off("router choices of the rollout are not replayed"),
    "_version": implied("names the framework's own code"),
    "schedule_policy": implied("an engine takes its requests as it likes; a step waits for all of them"),
    "agent.*": off(NO_AGENTS),
    "openai.*": off(NO_AGENTS),
    **{key: ENGINE[key] for key in ("setup_timeout", "request_timeout", "scheduling_spec", "scheduling_spec.*")},
    "scheduling_spec.*.env_vars.*": ENGINE["scheduling_spec.*.env_vars.*"],
    "*": unsupported("not among the rollout's options that are carried over"),
}

DATASET: Mapping[str, Rule] = {
    "type": only("rl", holds="prompts with answers", otherwise="prompts with answers; see `fivefold sft`"),
    "pin_memory": implied("data are read before the first step"),
    "num_workers": implied("data are read before the first step"),
    "num_dataset_workers": implied("data are read before the first step"),
    "drop_last": implied("each step has whole batches; an epoch's rest is drawn again"),
    "setup_timeout": implied("scheduler.timeout_s bounds every phase"),
    "scheduling_spec*": implied(RAY_PLACES),
    "dataset_kwargs": implied("empty"),
    "*": unsupported("not among the data options that are carried over"),
}

SGLANG_LIKE: Mapping[str, Rule] = {
    "model_path": implied("the actor's"),
    "model": implied("the actor's"),
    "random_seed": implied("the recipe's seed rules"),
    "seed": implied("the recipe's seed rules"),
    "dtype": to("rollout.dtype", DTYPE),
    "skip_tokenizer_init": implied("the engine is handed token ids"),
    "context_length": implied("follows from train_dataset.max_length and gconfig.max_new_tokens"),
    "max_model_len": implied("follows from train_dataset.max_length and gconfig.max_new_tokens"),
    "max_running_requests": to("rollout.max_batch_size", whole),
    "max_num_seqs": to("rollout.max_batch_size", whole),
    "mem_fraction_static": to("rollout.memory_fraction", number),
    "gpu_memory_utilization": to("rollout.memory_fraction", number),
    "enable_return_routed_experts": off("router choices of the rollout are not replayed"),
    "*": unsupported(NO_ENGINE_OPTIONS),
}

TOP: Mapping[str, Rule] = {
    "scheduler.type": _scheduler,
    "scheduler.*": implied("workers are Ray actors, rewards run in the driver"),
    "cluster.name_resolve.*": implied("Ray knows where workers are"),
    "cluster.cluster_name": implied("Ray knows where workers are"),
    "cluster.*": unsupported("not among the cluster's options that are carried over"),
    "async_training": off(SYNCHRONOUS),
    "enable_offload": off(NO_OFFLOAD),
    "dynamic_bs": off("each step trains on whole groups of train_dataset.batch_size prompts"),
    "total_train_n_seqs": unsupported("training ends after epochs or steps"),
    "weight_update_mode": implied("weights go from actor to rollout in buckets"),
    "gconfig.max_tokens": implied("follows from train_dataset.max_length and gconfig.max_new_tokens"),
    "gconfig.ignore_eos": off("a response ends with an end token"),
    "gconfig.skip_special_tokens": implied("rewards see responses without special tokens"),
    "gconfig.frequency_penalty": off("sampling is by temperature, top_p and top_k"),
    "gconfig.use_beam_search": off("responses are sampled"),
    "gconfig.lora_name": implied("only LoRA reads it"),
    "gconfig.*": unsupported("not among the sampling options that are carried over"),
    "saver.mode": implied("weights are written between steps"),
    **for_each(("saver.", "evaluator."), {"freq_epochs": unsupported(IN_STEPS), "freq_secs": unsupported(IN_STEPS)}),
    "evaluator.eval_before_train": implied("evaluates before the first step in any case"),
    "checkpointer.*": unsupported(NO_RESUME),
    "recover.mode": off(NO_RESUME),
    "recover.*": implied("only recover.mode says whether a run is resumed"),
    "stats_logger.wandb.mode": off(OWN_LOGS),
    "stats_logger.swanlab.mode": off(OWN_LOGS),
    "stats_logger.trackio.mode": off(OWN_LOGS),
    "stats_logger.tensorboard.path": implied(OWN_OUTPUTS),
    "stats_logger.*": implied("only its tracker reads it"),
    "perf_tracer.enabled": off(NO_PROFILER),
    "perf_tracer.session_tracer.enabled": off(NO_PROFILER),
    "perf_tracer.*": implied("only the tracer reads it"),
    "memory_profiler.*": unsupported(NO_PROFILER),
    "launcher.*": implied(RAY_PLACES),
    "critic.*": unsupported(NO_CRITIC),
    "teacher.*": unsupported("there is no teacher"),
    "server_only": off("a run rolls out and trains"),
    "--config": implied("names the configuration's file: give it before this one"),
    "workflow": unsupported(NO_AGENTS),
    "agent*": unsupported(NO_AGENTS),
}

RULES: Mapping[str, Rule] = {
    **TOP,
    **under("actor.", ACTOR),
    **under("ref.", ENGINE),
    "ref.mb_spec.*": implied(ONE_BUDGET),
    "ref.optimizer*": implied("the reference is not trained"),
    "ref.*": implied("the reference is the actor's kind of model, and not trained"),
    **under("rollout.", ROLLOUT),
    **for_each(("train_dataset.", "valid_dataset."), DATASET),
    "valid_dataset.batch_size": implied("all held-out prompts are evaluated at once"),
    "valid_dataset.shuffle": implied("all held-out prompts are evaluated at once"),
    **for_each(("sglang.", "vllm."), SGLANG_LIKE),
    **{key: to(key, convert) for key, convert in NATIVE.items()},
}
