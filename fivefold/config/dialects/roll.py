"""ROLL: one YAML file with a block for each role (actor_train, actor_infer, reference, rewards)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold.config.dialects import megatron
from fivefold.config.dialects.dialect import Dialect
from fivefold.config.dialects.draft import (
    Draft,
    Role,
    RolePlan,
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
    ESTIMATOR,
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
    advantages,
    one_path,
    rollout_engine,
    run_name,
    token_budget,
    top_k,
    trackers,
    warmup,
)

TRAIN, INFER, REF = "actor_train.", "actor_infer.", "reference."
STRATEGY, CONFIG = "strategy_args.strategy_name", "strategy_args.strategy_config."
MEAN, STD = "actor.reward_norm.mean_level", "actor.reward_norm.std_level"
NO_REWARD_MODEL = "rewards are functions, not models"

DEFAULTS: Mapping[str, Any] = {
    "adv_estimator": "gae",
    "rollout_batch_size": 128,
    "num_return_sequences_in_group": 1,
    "prompt_length": 1024,
    "max_steps": 500,
    "save_steps": 50,
    "eval_steps": 10,
    "seed": 42,
    "loss_agg_mode": "seq-mean-token-mean",
    "num_gpus_per_node": 8,
}


def convert(draft: Draft) -> None:
    """Everything that takes several keys, then the rest key by key."""
    _lay_out(draft)
    _lengths(draft)
    _advantages(draft)
    _kl(draft)
    _clipping(draft)
    _micro_batches(draft)
    _mini_batches(draft)
    _evaluation(draft)
    _rewards(draft)
    draft.apply(RULES)


# Layout


def _lay_out(draft: Draft) -> None:
    for role, section in (("actor", TRAIN), ("ref", REF)):
        if draft.keys(section + "*"):
            _lay_out_trainer(draft, role, section)
    if draft.keys(INFER + "*"):
        _lay_out_rollout(draft)
    switch = TRAIN + "model_args.disable_gradient_checkpointing"
    megatron.recompute(draft, TRAIN + CONFIG, switch, is_on=draft.get(switch, False) is False)


def _lay_out_trainer(draft: Draft, role: Role, section: str) -> None:
    key = section + "device_mapping"
    plan = draft.plans[role] = RolePlan(devices=draft.get(key), devices_key=key)
    strategy = str(draft.get(section + STRATEGY, "deepspeed_train"))
    if strategy.startswith("megatron"):
        megatron.degrees(draft, role, section + CONFIG)
        plan.keys[section + STRATEGY] = ""
    elif strategy.startswith(("fsdp2", "deepspeed")):
        plan.backend = "fsdp"
        plan.keys[section + STRATEGY] = "sharded by FSDP in its place" if strategy.startswith("deepspeed") else ""
        if draft.writes(section + "model_args.ulysses_size"):
            draft.lay_out(section + "model_args.ulysses_size", role, "cp")
    else:
        # hf_infer keeps whole copies of the reference.
        for written in (section + STRATEGY, key):
            draft.implied(written, "the reference runs in the actor's processes")
        del draft.plans[role]


def _lay_out_rollout(draft: Draft) -> None:
    key = INFER + "device_mapping"
    plan = draft.plans["rollout"] = RolePlan("vllm", devices=draft.get(key), devices_key=key)
    if draft.writes(INFER + STRATEGY):
        rollout_engine(draft, INFER + STRATEGY)
    tensor = [INFER + CONFIG + name for name in ("tensor_parallel_size", "tp_size")]
    for written in filter(draft.writes, tensor):
        draft.lay_out(written, "rollout", "tp")
    if draft.writes(INFER + CONFIG + "pipeline_parallel_size"):
        draft.lay_out(INFER + CONFIG + "pipeline_parallel_size", "rollout", "pp")
    per_worker = INFER + "num_gpus_per_worker"
    if plan.backend == "sglang" and draft.writes(per_worker) and not any(map(draft.writes, tensor)):
        draft.lay_out(per_worker, "rollout", "tp")
    draft.implied(per_worker, "follows from the rollout's degrees")


# Batches and lengths


def _lengths(draft: Draft) -> None:
    """Either the response's length, or that of the whole sequence."""
    prompt, response, sequence = draft.get("prompt_length"), "response_length", "sequence_length"
    if isinstance(draft.get(response), int):
        draft.mapped(response, "gconfig.max_new_tokens", whole(draft.get(response)))
        draft.implied(sequence, f"{response} rules")
    elif isinstance(draft.get(sequence), int) and isinstance(prompt, int):
        longest = whole(draft.get(sequence)) - prompt
        draft.mapped(sequence, "gconfig.max_new_tokens", longest, f"less prompt_length={prompt}")
    draft.implied(INFER + "generating_args.max_new_tokens", "response_length rules")
    draft.implied("validation.generating_args.max_new_tokens", "response_length rules")


def _sequence_length(draft: Draft) -> int | None:
    lengths = draft.get("prompt_length"), draft.recipe.get("gconfig.max_new_tokens")
    return sum(lengths) if all(isinstance(length, int) for length in lengths) else None


def _micro_batches(draft: Draft) -> None:
    """A token budget (dynamic batches or packing), or a number of sequences."""
    budget = "actor.mb_spec.max_tokens_per_mb"
    sequences = TRAIN + "training_args.per_device_train_batch_size"
    packed = TRAIN + "sequence_packing_args.max_packed_sequence_length_train"
    dynamic = TRAIN + "max_tokens_per_microbatch_in_train"
    for switch, key in ((TRAIN + "use_sequence_packing", packed), (TRAIN + "use_dynamic_batching_in_train", dynamic)):
        if draft.get(switch) is True and draft.get(key):
            draft.mapped(key, budget, whole(draft.get(key)))
            draft.implied(sequences, f"{key} rules")
        draft.implied(switch, "sequences are always packed, under a token budget")
        draft.implied(key, f"{switch} is off")
    if draft.is_open(sequences):
        token_budget(draft, sequences, draft.get(sequences), _sequence_length(draft))


def _mini_batches(draft: Draft) -> None:
    """An optimizer step takes per_device_train_batch_size * gradient_accumulation_steps sequences of each replica."""
    key = TRAIN + "training_args.gradient_accumulation_steps"
    steps = draft.get(key)
    per_device, prompts = draft.get(TRAIN + "training_args.per_device_train_batch_size", 1), draft.get("rollout_batch_size")
    plan, group = draft.plans.get("actor"), draft.get("num_return_sequences_in_group")
    if plan is None or plan.n_devices is None or not isinstance(steps, int):
        return
    replicas = plan.n_devices // (plan.get("tp") * plan.get("pp") * plan.get("cp"))
    update = per_device * steps * replicas
    if update < 1 or (prompts * group) % update or prompts % (prompts * group // update):
        draft.unsupported(
            key, f"{prompts} prompts of {group} responses do not divide into updates of {update} sequences, groups whole"
        )
        return
    updates = prompts * group // update
    note = f"{prompts}*{group} sequences in updates of {per_device}*{steps}*{replicas} replicas"
    draft.mapped(key, "actor.ppo_n_minibatches", updates, note)
    warm = TRAIN + "training_args.warmup_steps"
    if draft.writes(warm):
        warmup(draft, warm, whole(draft.get("max_steps")) * updates * draft.get("ppo_epochs", 1))


# Algorithm


def _advantages(draft: Draft) -> None:
    """`norm_mean_type` and `norm_std_type`, or the older `reward_norm`; whitening, where neither is set."""
    estimator, n_samples = str(draft.get("adv_estimator")), draft.get("num_return_sequences_in_group")
    if estimator != "reinforce":
        advantages(draft, "adv_estimator", estimator, divides_by_std=True, n_samples=n_samples)
    draft.implied("adv_estimator", "rewards are the advantages, once they are normalised")
    levels = {"batch": "batch", "group": "group"}
    for key, target in (("norm_mean_type", MEAN), ("norm_std_type", STD)):
        if draft.get(key) in levels:
            draft.mapped(key, target, levels[draft.get(key)])
        elif draft.get(key) is not None:
            draft.unsupported(key, "rewards are normalised over the group, the batch, or not at all")
    if draft.get("reward_norm") in levels:
        draft.mapped("reward_norm", STD if draft.get("reward_scale") is True else MEAN, levels[draft.get("reward_norm")])
        if draft.get("reward_shift") is not True:
            draft.recipe.setdefault(STD, levels[draft.get("reward_norm")])
    for key in ("reward_shift", "reward_scale"):
        draft.implied(key, "says which of mean and std reward_norm takes")
    _whitening(draft)
    if estimator == "reinforce":
        for target in (MEAN, STD):
            draft.recipe.setdefault(target, "none")


def _whitening(draft: Draft) -> None:
    key = "whiten_advantages"
    if draft.get(key) is not True:
        draft.implied(key, "switched off")
    elif MEAN in draft.recipe or STD in draft.recipe:
        draft.unsupported(key, "rewards are normalised once, and that is done already")
    else:
        draft.recipe[STD] = "batch"
        draft.mapped(key, MEAN, "batch", f"with {STD}=batch; over sequences, not weighted by their tokens")


def _kl(draft: Draft) -> None:
    """A KL loss to the reference (k3), or a penalty on each token's reward."""
    if draft.get("use_kl_loss") is True:
        draft.mapped("use_kl_loss", "actor.kl_in", "loss")
        draft.recipe["actor.kl_estimator"] = "k3"
        draft.mapped("kl_loss_coef", "actor.kl_ctl", number(draft.get("kl_loss_coef", 0.0)), "estimator k3")
    elif draft.get("add_token_level_kl") is True:
        draft.mapped("add_token_level_kl", "actor.kl_in", "reward")
        draft.mapped("kl_penalty", "actor.kl_estimator", ESTIMATOR(draft.get("kl_penalty", "kl")))
        draft.recipe.setdefault("actor.kl_estimator", "k1")
        draft.recipe.setdefault("actor.kl_ctl", number(draft.get("init_kl_coef", 0.2)))
        draft.mapped("init_kl_coef", "actor.kl_ctl", number(draft.get("init_kl_coef", 0.2)))
    if draft.get("add_token_level_kl") is True:
        draft.unsupported("add_token_level_kl", "there is one KL term, and it is in the loss")
    for key in ("use_kl_loss", "kl_loss_coef", "add_token_level_kl", "init_kl_coef", "kl_penalty"):
        draft.implied(key, "this KL term is off")
    if draft.get("target_kl") is None:
        draft.implied("kl_horizon", "the weight of the KL term is fixed")


def _clipping(draft: Draft) -> None:
    both = number(draft.get("pg_clip", 0.2))
    if draft.get("use_pg_clip_range") is True:
        for key, target in (("pg_clip_low", "actor.eps_clip"), ("pg_clip_high", "actor.eps_clip_higher")):
            draft.recipe.setdefault(target, number(draft.get(key, 0.2)))
            draft.mapped(key, target, draft.recipe[target])
        draft.implied("pg_clip", "pg_clip_low and pg_clip_high rule")
    draft.mapped("pg_clip", "actor.eps_clip", both)
    for key in ("use_pg_clip_range", "pg_clip_low", "pg_clip_high"):
        draft.implied(key, "says whether the range has two sides")
    if draft.get("dual_clip_loss") is True:
        draft.mapped("dual_clip_loss", "actor.c_clip", 1 + 2 * both, "1 + 2 * pg_clip")


def _evaluation(draft: Draft) -> None:
    own = "validation.generating_args."
    temperature = draft.get(own + "temperature")
    if temperature is None:
        return
    draft.mapped(own + "temperature", "evaluator.temperature", number(temperature), "sampled: evaluator.greedy=false")
    draft.recipe.setdefault("evaluator.greedy", False)
    for name in ("top_p", "top_k"):
        if draft.get(own + name) == draft.get(INFER + "generating_args." + name):
            draft.implied(own + name, "as in training")
        draft.unsupported(own + name, f"evaluation takes {name} from gconfig")


def _rewards(draft: Draft) -> None:
    """One rule-based mathematical reward is offered; of several domains, none can be chosen for the user."""
    names = {key.split(".")[1] for key in draft.keys("rewards.*")}
    for name in sorted(names):
        worker = f"rewards.{name}.worker_cls"
        if "MathRule" not in str(draft.get(worker, "")):
            for key in draft.keys(f"rewards.{name}.*"):
                draft.unsupported(key, "write this reward as reward.fn=module:function")
        elif len(names) == 1:
            draft.mapped(worker, "reward.fn", "math")
        else:
            draft.unsupported(worker, "there is one reward function; let yours choose by data_source")


# Keys on their own

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
    "warmup_steps": off("the warm-up is a share of all steps: set actor.optimizer.warmup_steps_proportion"),
    "num_train_epochs": implied("max_steps says how long training is"),
    "gradient_accumulation_steps": unsupported("updates in a step are counted by actor.ppo_n_minibatches"),
    "per_device_train_batch_size": unsupported("micro-batches have a token budget; set actor.mb_spec.max_tokens_per_mb"),
    "*": unsupported("not among the training options that are carried over"),
}

DATA_ARGS: Mapping[str, Rule] = {
    "file_name": one_path("train_dataset.path"),
    "messages": to("train_dataset.prompt_key", text),
    "prompt": to("train_dataset.prompt_key", text),
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
    "is_offload_*": off(NO_OFFLOAD),
    "model_update_buffer_size_mb": implied("weights come from the actor, in buckets"),
    "profiler_*": off(NO_PROFILER),
    "model_download_type": unsupported("models are read from the Hugging Face hub, or from a folder"),
    "global_template": implied("the tokenizer's own chat template is applied"),
    "system_envs.*": unsupported("set environment variables in the shell that starts the run"),
    "hydra.*": implied("says how the launcher starts, not what it trains"),
    "defaults": unsupported("files that `defaults` names are not read; give them before this one"),
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

RULES: Mapping[str, Rule] = {
    **TOP,
    **for_each((TRAIN, INFER, REF), WORKER),
    **under(INFER + CONFIG, {"*": unsupported(NO_ENGINE_OPTIONS)}),
    **for_each((INFER, REF), under("model_args.", {**MODEL_ARGS, "dtype": implied("the actor's"), "model_name_or_path": implied("the actor's")})),
    **under(TRAIN + "model_args.", MODEL_ARGS),
    **for_each((TRAIN + CONFIG, REF + CONFIG), megatron.OVERRIDES),
    **under(TRAIN + "training_args.", TRAINING_ARGS),
    **under(TRAIN + "data_args.", DATA_ARGS),
    **under(INFER + "generating_args.", GENERATING_ARGS),
    **under("validation.data_args.", VALIDATION_DATA),
    TRAIN + CONFIG + "overlap_grad_reduce": megatron.DDP["overlap_grad_reduce"],
}

DIALECT = Dialect("ROLL", convert, DEFAULTS)
