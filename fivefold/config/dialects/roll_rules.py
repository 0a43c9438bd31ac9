"""ROLL, key by key: what each becomes, where one key alone decides it."""

from __future__ import annotations

from collections.abc import Mapping

from fivefold.config.dialects import megatron
from fivefold.config.dialects.draft import (
    Rule,
    every_steps,
    flag,
    for_each,
    implied,
    number,
    off,
    only,
    text,
    to,
    under,
    unsupported,
    whole,
)
from fivefold.config.dialects.meanings import (
    AGGREGATION,
    ANY_CHECKPOINT,
    DTYPE,
    NO_AGENTS,
    NO_CRITIC,
    NO_ENGINE_OPTIONS,
    NO_LORA,
    NO_MULTIMODAL,
    NO_OFFLOAD,
    NO_PROFILER,
    NO_RESUME,
    ONE_BUDGET,
    OWN_OUTPUTS,
    SCHEDULE,
    SYNCHRONOUS,
    one_path,
    run_name,
    top_k,
    trackers,
)

TRAIN, INFER, REF = "actor_train.", "actor_infer.", "reference."
CONFIG = "strategy_args.strategy_config."
NO_REWARD_MODEL = "rewards are functions, not models"

MODEL_ARGS: Mapping[str, Rule] = {
    "dtype": to("actor.dtype", DTYPE),
    "model_type": only("trl", holds="a causal language model", otherwise="models are causal language models"),
    "model_name_or_path": to("actor.path", text),
    "attn_implementation": implied(megatron.KERNELS),
    "flash_attn": implied(megatron.KERNELS),
    "device_map": implied("the layout says where a model lies"),
    "disable_gradient_checkpointing": implied("fsdp and inference recompute nothing"),
    "gradient_checkpointing_use_reentrant": implied("recomputation is Megatron-Core's own"),
    "moe_aux_loss_coef": to("actor.megatron.transformer.moe_aux_loss_coeff", number),
    "lora_rank": off(NO_LORA),
    "lora_target": unsupported(NO_LORA),
    "lora_*": implied("only LoRA reads it"),
    "adapter_name_or_path": unsupported(NO_LORA),
    "freeze_module_prefix": off("all weights are trained"),
    "ulysses_size": only(1, holds="one", otherwise="context parallelism is read where a model is trained"),
    "*": unsupported("not among the model options that are carried over"),
}

TRAINING_ARGS: Mapping[str, Rule] = {
    "learning_rate": to("actor.optimizer.lr", number),
    "weight_decay": to("actor.optimizer.weight_decay", number),
    "adam_beta1": to("actor.optimizer.beta1", number),
    "adam_beta2": to("actor.optimizer.beta2", number),
    "adam_epsilon": to("actor.optimizer.eps", number),
    "lr_scheduler_type": to("actor.optimizer.lr_scheduler_type", SCHEDULE),
    "warmup_ratio": to("actor.optimizer.warmup_steps_proportion", number),
    "seed": implied("the recipe's seed rules"),
    "data_seed": implied("the recipe's seed rules"),
    "dataloader_num_workers": implied("data are read before the first step"),
    "num_train_epochs": implied("max_steps says how long training is"),
    "per_device_train_batch_size": unsupported(
        "micro-batches have a token budget; set actor.mb_spec.max_tokens_per_mb"
    ),
    "*": unsupported("not among the training options that are carried over"),
}

DATA_ARGS: Mapping[str, Rule] = {
    "file_name": one_path("train_dataset.path"),
    "messages": to("train_dataset.prompt_key", text),
    "prompt": to("train_dataset.prompt_key", text),
    "response": to("train_dataset.answer_key", text),
    "enable_thinking": unsupported("a chat template is applied as it stands"),
    "tag": implied("rewards are told the row's data_source"),
    "rollout_dataloader_*": implied("data are read before the first step"),
    "template": implied("the tokenizer's own chat template is applied"),
    "dataset_dir": implied("paths are read as they stand"),
    "dataset_type": implied("JSONL and parquet files are told by their suffix"),
    "preprocessing_num_workers": implied("data are read before the first step"),
    "interleave_probs": implied("one data set is read, shuffled by the seed"),
    "domain_interleave_probs.*": only(
        1, holds="the only domain", otherwise="one data set is read, shuffled by the seed; mix domains in its file"
    ),
    "cache_path": implied("data are read before the first step"),
    "*": unsupported("not among the data options that are carried over"),
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
    "num_return_sequences": implied("num_return_sequences_in_group rules"),
    "num_beams": only(1, holds="responses are sampled", otherwise="there is no beam search"),
    "do_sample": only(True, holds="responses are sampled", otherwise="responses of training are sampled"),
    "max_new_tokens": to("gconfig.max_new_tokens", whole),
    "*": unsupported("not among the sampling options that are carried over"),
}

FSDP: Mapping[str, Rule] = {
    "enable_mix_precision": implied("weights are bfloat16, master weights float32"),
    "fsdp_size": implied("shards over all devices"),
    "reshard_after_forward": implied("the engine decides what to keep"),
    "wrap_policy.*": implied("each layer is a unit of its own"),
    "offload_policy": off(NO_OFFLOAD),
    "use_batched_model_update": implied("weights come from the actor, in buckets"),
    "param_dtype": implied("actor.dtype says it"),
    "reduce_dtype": implied("gradients are reduced in float32"),
}
"""Strategy options of fsdp2_train."""

WORKER: Mapping[str, Rule] = {
    "infer_batch_size": implied(ONE_BUDGET),
    "worker_cls": unsupported("roles run Fivefold's own workers"),
    "world_size": implied("follows from the layout"),
    "device_mapping": implied("the role runs beside the actor"),
    "use_remove_padding": implied("sequences are always packed"),
    "use_dynamic_batching_in_infer": implied(ONE_BUDGET),
    "max_tokens_per_microbatch_in_infer": implied(ONE_BUDGET),
    "sequence_length_round_in_*": implied("sequences are packed at their own lengths"),
    "sequence_packing_args.*": implied("sequences are packed by the cost of attention, under one token budget"),
    "use_sequence_packing": implied("sequences are always packed"),
    "backend_timeout": implied("scheduler.timeout_s bounds every phase"),
    "logits_in_fp32": implied("log-probabilities are computed in float32"),
    "apply_loss_scale": implied("losses are divided by global counts"),
    "offload_nccl": off(NO_OFFLOAD),
    "system_envs.*": unsupported("set environment variables in the shell that starts the run"),
    "data_args.*": implied("the actor's data are read"),
    "strategy_args.strategy_config": implied("empty"),
    "model_update_frequency": only(1, holds="weights are updated every step", otherwise=SYNCHRONOUS),
    "*": unsupported("not among the options of a role that are carried over"),
}

TOP: Mapping[str, Rule] = {
    "exp_name": to("experiment_name", run_name),
    "seed": to("seed", whole),
    "pretrain": to("actor.path", text),
    "reward_pretrain": implied(NO_CRITIC),
    "num_gpus_per_node": to("cluster.n_gpus_per_node", whole),
    "num_nodes": to("cluster.n_nodes", whole),
    "output_dir": to("cluster.fileroot", text, OWN_OUTPUTS),
    "logging_dir": implied(OWN_OUTPUTS),
    "base_dir": implied(OWN_OUTPUTS),
    "rollout_dump_dir": implied("samples of each step are written to samples.jsonl"),
    "checkpoint_config.*": implied(ANY_CHECKPOINT),
    "track_with": trackers,
    "tracker_kwargs.*": implied(OWN_OUTPUTS),
    "rpc_timeout": to("scheduler.timeout_s", number),
    "max_steps": to("total_train_steps", whole),
    "save_steps": every_steps("saver.freq_steps"),
    "eval_steps": every_steps("evaluator.freq_steps"),
    "validation.eval_steps": every_steps("evaluator.freq_steps"),
    "logging_steps": only(1, holds="every step is logged", otherwise="every step is logged"),
    "max_ckpt_to_keep": implied("newer weights replace older ones"),
    "resume_from_checkpoint": off(NO_RESUME),
    "rollout_batch_size": to("train_dataset.batch_size", whole),
    "val_batch_size": implied("all held-out prompts are evaluated at once"),
    "val_n_sample": to("evaluator.n_samples", whole),
    "val_greedy": to("evaluator.greedy", flag),
    "val_prompt_length": to("valid_dataset.max_length", whole),
    "val_sequence_length": implied("follows from gconfig.max_new_tokens"),
    "prompt_length": to("train_dataset.max_length", whole),
    "num_return_sequences_in_group": to("gconfig.n_samples", whole),
    "ppo_epochs": to("actor.ppo_epochs", whole),
    "max_grad_norm": to("actor.optimizer.gradient_clipping", number),
    "entropy_loss_coef": to("actor.entropy_coeff", number),
    "loss_agg_mode": to("actor.loss_aggregation", AGGREGATION),
    "reward_clip": to("actor.reward_clip", number, "clipped before rewards are normalised, not after"),
    "target_kl": unsupported("the weight of the KL term is fixed"),
    "value_clip": implied(NO_CRITIC),
    "lambd": implied(NO_CRITIC),
    "gamma": implied(NO_CRITIC),
    "critic_warmup": implied(NO_CRITIC),
    "advantage_clip": unsupported("advantages are not clipped; the loss is"),
    "importance_sampling": only("token", holds="ratios of tokens", otherwise="the loss has ratios of tokens"),
    "max_len_mask": off("a response that is cut off is trained like any other"),
    "difficulty_mask": off("prompts are not masked by how hard they are; an equal group has advantage 0"),
    "difficulty_*_threshold": implied("only difficulty_mask reads it"),
    "error_max_len_clip": off("a response that is cut off is trained like any other"),
    "error_max_len_threshold": implied("only error_max_len_clip reads it"),
    "difficulty_loss_weight": off("samples are weighted equally"),
    "length_loss_weight": off("samples are weighted equally"),
    "add_len_reward": off("a response's reward is what reward.fn returns"),
    "use_reward_scaling": off("set actor.reward_scaling to a number"),
    "use_reward_norm": off("set actor.reward_norm"),
    "whiten_rewards": off("rewards are normalised once"),
    "async_generation_ratio": off(SYNCHRONOUS),
    "generate_opt_level": implied("how requests are scheduled is the engine's business"),
    "is_num_return_sequences_expand": implied("each response is a request of its own"),
    "max_running_requests": to("rollout.max_batch_size", whole),
    "is_use_additional_prompts": off("each step samples train_dataset.batch_size prompts"),
    "use_additional_prompts": off("each step samples train_dataset.batch_size prompts"),
    "max_additional_running_prompts": implied("only is_use_additional_prompts reads it"),
    "enable_reference": implied("a reference is loaded if actor.kl_ctl is above 0"),
    "enable_old_logprobs_recompute": implied("old log-probabilities are computed where they can differ"),
    "offload_backend": implied("nothing is offloaded"),
    "is_offload_*": off(NO_OFFLOAD),
    "model_update_buffer_size_mb": implied("weights come from the actor, in buckets"),
    "profiler_*": off(NO_PROFILER),
    "model_download_type": unsupported("models are read from the Hugging Face hub, or from a folder"),
    "global_template": implied("the tokenizer's own chat template is applied"),
    "system_envs.*": unsupported("set environment variables in the shell that starts the run"),
    "hydra.*": implied("says how the launcher starts, not what it trains"),
    "defaults": unsupported("files that `defaults` names are not read; give them before this one"),
    **dict.fromkeys(
        ("enable_think", "action_sep", "use_turn_scores", "max_actions_per_traj", "reward_normalization.*", "render_*"),
        unsupported(NO_AGENTS),
    ),
    "enable_response_mask": implied("only responses are trained"),
    "critic.*": implied(NO_CRITIC),
    "reward.*": unsupported(NO_REWARD_MODEL),
    "reward_model.*": unsupported(NO_REWARD_MODEL),
    "rewards.*": implied("rewards are computed beside the rollout"),
    "validation.generating_args.num_return_sequences": to("evaluator.n_samples", whole),
    "validation.generating_args.num_beams": GENERATING_ARGS["num_beams"],
    "validation.*": unsupported("not among the options of validation that are carried over"),
    "*env*": unsupported(NO_AGENTS),
    "vlm_filter.*": implied(NO_MULTIMODAL),
    "dataset_filter.*": unsupported("rows are not filtered; prepare the file"),
}

ENGINE_OPTIONS: Mapping[str, Rule] = {
    "max_num_seqs": to("rollout.max_batch_size", whole),
    "load_format": implied("weights come from the actor"),
    "sleep_level": implied("roles that share devices take turns on their memory"),
    "*": unsupported(NO_ENGINE_OPTIONS),
}

ACTORS_MODEL: Mapping[str, Rule] = {
    **MODEL_ARGS,
    "dtype": implied("the actor's"),
    "model_name_or_path": implied("the actor's"),
}

RULES: Mapping[str, Rule] = {
    **TOP,
    **for_each((TRAIN, INFER, REF), WORKER),
    **under(INFER + CONFIG, ENGINE_OPTIONS),
    **for_each((INFER, REF), under("model_args.", ACTORS_MODEL)),
    **under(TRAIN + "model_args.", MODEL_ARGS),
    **under(TRAIN + CONFIG, megatron.OVERRIDES),
    **under(REF + CONFIG, {"*": implied(megatron.AS_ACTOR)}),
    **under(TRAIN + "training_args.", TRAINING_ARGS),
    **under(TRAIN + "data_args.", DATA_ARGS),
    **under(INFER + "generating_args.", GENERATING_ARGS),
    **under("validation.data_args.", VALIDATION_DATA),
    **under(TRAIN + CONFIG, FSDP),
    TRAIN + CONFIG + "overlap_grad_reduce": megatron.DDP["overlap_grad_reduce"],
}
