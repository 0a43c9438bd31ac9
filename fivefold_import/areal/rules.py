"""AReaL, key by key: what becomes of each key that no other key decides about."""

from __future__ import annotations

from collections.abc import Mapping

from fivefold_import import megatron, reasons
from fivefold_import.algorithms import loss_by_name, option_of_loss
from fivefold_import.areal.native import FREQUENCIES, NATIVE
from fivefold_import.critic import of_critic
from fivefold_import.draft import Draft, Rule
from fivefold_import.rules import (
    concurrent_rollouts,
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
from fivefold_import.settings import switched_trackers
from fivefold_import.values import (
    DTYPE,
    flag,
    number,
    one_of,
    text,
    whole,
)

RAY_PLACES = "Ray places one worker on each device"
BEFORE_NEEDED = "parameters are gathered before they are needed"


def _overlong(rule: Rule) -> Rule:
    """Apply `rule` to an option of the punishment of over-long responses, if that is switched on."""

    def only_if_on(draft: Draft, key: str) -> None:
        if draft.get("actor.overlong_reward_penalty") is True:
            rule(draft, key)
        draft.implied(key, "only overlong_reward_penalty reads this")

    return only_if_on


def _proximal(draft: Draft, key: str) -> None:
    """Convert how the decoupled objective finds old log-probabilities."""
    match draft.get(key):
        case "loglinear":
            draft.mapped(key, "actor.prox_logp_method", "loglinear", "the actor counts as one version newer")
        case "recompute" | "metrics":
            draft.implied(key, "old log-probabilities are computed by the trainer")
        case _:
            draft.unsupported(key, "old log-probabilities are computed by the trainer, or interpolated (loglinear)")


def _scheduler(draft: Draft, key: str) -> None:
    """Convert the scheduler's type, which is `local`, `ray`, or a batch system that jobs are submitted to."""
    value = draft.get(key)
    if value in ("local", "ray"):
        draft.mapped(key, key, value)
    else:
        reason = f"jobs are not submitted to {value}: start Ray there, and join it with scheduler.type=ray"
        draft.unsupported(key, reason)


def _recovery(draft: Draft, key: str) -> None:
    """Convert whether a run goes on from its newest checkpoint; `fault` and `resume` are older releases'."""
    match draft.get(key):
        case True | "on" | "auto":
            draft.mapped(key, key, "auto")
        case False | "off" | "disabled":
            draft.mapped(key, key, "disabled")
        case "fault":
            draft.mapped(key, key, "auto", "the same command goes on, whether or not an error has ended the run")
        case "resume":
            draft.mapped(key, key, "auto", "without a checkpoint, the run starts from its beginning")
        case other:
            draft.unsupported(key, f"{other!r} is not offered; there are auto and disabled")


def _optimizer(draft: Draft, key: str) -> None:
    """Convert the optimizer's name; `adam_bf16` is FSDP's, with moments in bfloat16."""
    match draft.get(key):
        case "adam":
            draft.implied(key, reasons.ADAMW)
        case "adam_bf16":
            draft.recipe.setdefault("actor.fsdp.optimizer.exp_avg_sq_dtype", "bfloat16")
            draft.mapped(key, "actor.fsdp.optimizer.exp_avg_dtype", "bfloat16", "and exp_avg_sq_dtype")
        case _:
            draft.unsupported(key, reasons.ADAMW)


ENGINE: Mapping[str, Rule] = {
    "attn_impl": implied(reasons.ATTENTION),
    "use_kernels": implied(reasons.KERNELS),
    "disable_dropout": only(True, holds="models are trained without dropout"),
    "offload": off(reasons.NO_OFFLOAD),
    "pad_to_maximum": off("sequences are packed at their own lengths"),
    "is_critic": off("a critic has a section of its own"),
    "grad_reduce_dtype": only("float32", holds=reasons.FLOAT32_REDUCTION),
    "optimizer_dtype": only("float32", holds=reasons.FLOAT32_STATES),
    "weight_update_mode": implied(reasons.WEIGHTS_IN_BUCKETS),
    "use_lora": off(reasons.NO_LORA),
    "lora_*": implied(reasons.ONLY_LORA),
    "peft_type": implied(reasons.ONLY_LORA),
    "target_modules": implied(reasons.ONLY_LORA),
    "enable_tree_training": off("responses of a prompt do not share its computation in training"),
    "mb_spec.granularity": only(1, holds="sequences are packed one by one"),
    "mb_spec.n_mbs_divisor": only(1, holds="the pipeline says what the number of micro-batches must divide by"),
    "mb_spec.packing_algorithm": implied("packing balances the cost of attention"),
    "scheduling_spec": implied(RAY_PLACES),
    "scheduling_spec.*": implied(RAY_PLACES),
    "scheduling_spec.*.env_vars.*": unsupported(reasons.OWN_ENVIRONMENT),
    "scheduling_strategy": implied("roles have devices of their own where the cluster has room"),
    "fsdp.wrap_policy*": implied(reasons.LAYER_UNITS),
    "fsdp.offload_params": off(reasons.NO_OFFLOAD),
    "fsdp.*": unsupported(reasons.NOT_FSDP),
    "archon.*": unsupported("training on Megatron-Core has no counterpart of this option of Archon"),
    "log_level": implied("workers write their logs below the run's folder"),
    "request_timeout": implied(reasons.TIMEOUT),
    "setup_timeout": implied(reasons.TIMEOUT),
    "admin_api_key": implied("roles are Ray actors, without a server"),
    "_version": implied(reasons.OWN_CODE),
}
"""Keys that the actor and the reference both have."""

MEGATRON: Mapping[str, Rule] = {
    **megatron.TRANSFORMER,
    **under("ddp.", megatron.DDP),
    "ddp.check_for_nan_in_grad": implied("a step whose gradient is not finite is skipped, and explained"),
    "ddp.overlap_param_gather": off(BEFORE_NEEDED),
    "ddp.align_param_gather": off(BEFORE_NEEDED),
    "ddp.bucket_size": to("actor.megatron.ddp.bucket_size", whole),
    "ddp.fp8_param_gather": off(reasons.MIXED_PRECISION),
    "wrap_with_ddp": only(True, holds="gradients are always kept by Megatron-Core's DDP"),
    "use_torch_fsdp2": off(reasons.WHOLE_IN_PASSES),
    "use_custom_fsdp": off(reasons.WHOLE_IN_PASSES),
    "overlap_param_gather_with_optimizer_step": off(BEFORE_NEEDED),
    **megatron.OPTIMIZER_STATE,
    "async_save": implied(reasons.IN_BACKGROUND),
    "use_checkpoint_opt_param_scheduler": implied(reasons.RECIPES_SCHEDULE),
    "bridge_type": implied(reasons.OWN_BRIDGE),
    "use_mbridge_save": implied(reasons.OWN_BRIDGE),
    "use_bridge_for_update_weights": implied(reasons.OWN_BRIDGE),
}

ACTOR: Mapping[str, Rule] = {
    **ENGINE,
    **under("megatron.", MEGATRON),
    "fsdp.offload_params": moments_on_host,
    "optimizer.type": _optimizer,
    "optimizer.*loss_scale*": implied("bfloat16 and float32 need no loss scale"),
    "optimizer.hysteresis": implied("bfloat16 and float32 need no loss scale"),
    "offload": offload_all,
    "optimizer.offload": if_on("actor.offload.optimizer", reasons.PLAN_OFFLOADS),
    "overlong_reward_penalty": if_on("actor.overlong_reward_penalty", "it is switched off"),
    "overlong_tokens": _overlong(to("actor.overlong_tokens", whole)),
    "overlong_penalty_factor": _overlong(to("actor.overlong_penalty_factor", number)),
    "dynamic_sampling": off(
        "AReaL leaves groups of equal rewards out, and nothing takes their place; here their advantages are 0 before "
        "they are whitened, and their tokens count. actor.dynamic_sampling replaces them, in synchronous training"
    ),
    "mask_no_eos_with_zero": off(reasons.TRUNCATED_TRAINED),
    "mask_too_long": off(reasons.TRUNCATED_TRAINED),
    "discount": implied(reasons.SAME_ADVANTAGE),
    "gae_lambda": implied(reasons.SAME_ADVANTAGE),
    "use_sapo_loss": loss_by_name(False, name="sapo"),
    "use_cispo_loss": loss_by_name(False, name="cispo"),
    **{f"sapo_{tau}": option_of_loss(tau, "sapo", "actor.use_sapo_loss", True) for tau in ("tau_pos", "tau_neg")},
    "use_decoupled_loss": implied("it is switched off"),
    "behav*_imp_weight_*": unsupported("rejection_sampling or m2_threshold is in its place"),
    "rejection_sampling": implied("it is switched off"),
    "prox_logp_method": _proximal,
    "importance_sampling_level": loss_by_name("token"),
    "colocated": only(True, False, holds="the layout says which roles share devices", otherwise=reasons.SYNCHRONOUS),
    "colocated_weight_path": implied(reasons.WEIGHTS_IN_BUCKETS),
    "*icepop*": unsupported(reasons.NO_CORRECTION),
    "log_agent_stats": off(reasons.NO_AGENTS),
    "log_agent_stats_keys": implied(reasons.NO_AGENTS),
    "entropy_coeff": to("actor.entropy_coeff", number),
    "temperature": unsupported("the loss is computed with gconfig.temperature"),
    "max_new_tokens": unsupported("gconfig.max_new_tokens is the limit"),
}

CRITIC: Mapping[str, Rule] = of_critic(
    {
        **ENGINE,
        **under("megatron.", MEGATRON),
        **{
            key.removeprefix("actor."): to(key, convert)
            for key, convert in NATIVE.items()
            if key.startswith(("actor.optimizer.", "actor.mb_spec.", "actor.megatron."))
        },
        "path": to("actor.path", text),
        "dtype": to("actor.dtype", DTYPE),
        "init_from_scratch": to("actor.init_from_scratch", flag),
        "ppo_n_minibatches": to("actor.ppo_n_minibatches", whole),
        "eps_clip": to("critic.eps_clip", number),
        "is_critic": implied("the section is the critic's"),
        "offload": if_on("actor.offload.params", "on GPUs that it shares, a critic offloads its state anyway"),
        **{key: ACTOR[key] for key in ("optimizer.type", "optimizer.*loss_scale*", "optimizer.hysteresis")},
        "optimizer.offload": ACTOR["optimizer.offload"],
        "mask_no_eos_with_zero": off(reasons.TRUNCATED_TRAINED),
        "*": unknown("the critic"),
    }
)

ROLLOUT: Mapping[str, Rule] = {
    "max_concurrent_rollouts": concurrent_rollouts("rollout.max_head_offpolicyness"),
    "queue_size": implied(reasons.AHEAD),
    "consumer_batch_size": unsupported(reasons.FIXED_BATCH),
    "max_head_offpolicyness": staleness(),
    "enable_rollout_tracing": off(reasons.SAMPLES_FILE),
    "check_trajectory_format": implied("samples are typed, so their format needs no check"),
    "dump_to_file": implied(reasons.SAMPLES_FILE),
    "pause_grace_period": implied(reasons.GOES_ON),
    "request_retries": implied(reasons.NO_RETRY),
    "use_lora": off(reasons.NO_LORA),
    "lora_name": implied(reasons.ONLY_LORA),
    "return_routed_experts": off(reasons.NO_ROUTER_REPLAY),
    "_version": implied(reasons.OWN_CODE),
    "schedule_policy": implied(reasons.ENGINE_SCHEDULES),
    "agent.*": off(reasons.NO_AGENTS),
    "openai.*": off(reasons.NO_AGENTS),
    **{key: ENGINE[key] for key in ("setup_timeout", "request_timeout", "scheduling_spec", "scheduling_spec.*")},
    "scheduling_spec.*.env_vars.*": ENGINE["scheduling_spec.*.env_vars.*"],
    "*": unknown("the rollout"),
}

DATASET: Mapping[str, Rule] = {
    "type": only("rl", holds="data are prompts with answers", otherwise="`fivefold sft` trains on responses"),
    "pin_memory": implied(reasons.READ_FIRST),
    "num_workers": implied(reasons.READ_FIRST),
    "num_dataset_workers": implied(reasons.READ_FIRST),
    "drop_last": implied("every step has a whole batch; prompts that are left at an epoch's end are drawn again"),
    "setup_timeout": implied(reasons.TIMEOUT),
    "scheduling_spec*": implied(RAY_PLACES),
    "dataset_kwargs": implied("the section is empty"),
    "*": unknown("the data"),
}

SGLANG_LIKE: Mapping[str, Rule] = {
    "model_path": implied("the actor's model is served"),
    "model": implied("the actor's model is served"),
    "random_seed": implied(reasons.ONE_SEED),
    "seed": implied(reasons.ONE_SEED),
    "dtype": to("rollout.dtype", DTYPE),
    "skip_tokenizer_init": implied(reasons.TOKEN_IDS),
    "context_length": implied(reasons.LENGTHS),
    "max_model_len": implied(reasons.LENGTHS),
    "max_running_requests": to("rollout.max_batch_size", whole),
    "max_num_seqs": to("rollout.max_batch_size", whole),
    "mem_fraction_static": to("rollout.memory_fraction", number),
    "gpu_memory_utilization": to("rollout.memory_fraction", number),
    "enable_return_routed_experts": off(reasons.NO_ROUTER_REPLAY),
    "*": unsupported(reasons.NO_ENGINE_OPTIONS),
}

TOP: Mapping[str, Rule] = {
    "scheduler.type": _scheduler,
    "scheduler.*": implied("workers are Ray actors, and rewards run in the driver"),
    "cluster.name_resolve.*": implied("Ray finds the workers"),
    "cluster.cluster_name": implied("Ray finds the workers"),
    "cluster.*": unknown("the cluster"),
    "async_training": implied(reasons.AHEAD),
    "enable_offload": offload_all,
    "dynamic_bs": off("each step trains on whole groups of train_dataset.batch_size prompts"),
    "total_train_n_seqs": unsupported("training ends after epochs or steps"),
    "weight_update_mode": implied(reasons.WEIGHTS_IN_BUCKETS),
    "gconfig.max_tokens": implied(reasons.LENGTHS),
    "gconfig.ignore_eos": off(reasons.END_TOKEN),
    "gconfig.skip_special_tokens": implied("rewards see responses without special tokens"),
    "gconfig.frequency_penalty": off(reasons.SAMPLING),
    "gconfig.use_beam_search": off("there is no beam search"),
    "gconfig.lora_name": implied(reasons.ONLY_LORA),
    "gconfig.*": unknown("sampling"),
    "saver.mode": implied(reasons.BETWEEN_STEPS),
    "evaluator.eval_before_train": implied(reasons.EVALUATES_FIRST),
    **{f"checkpointer.{name}": to(f"recover.{name}", convert) for name, convert in FREQUENCIES.items()},
    "checkpointer.*": unknown("checkpoints"),
    "recover.mode": _recovery,
    "recover.retries": implied(reasons.SAME_COMMAND),
    "recover.no_*_optim": off(reasons.WHOLE_CHECKPOINTS),
    "recover.*": unknown("checkpoints"),
    "stats_logger.*.mode": switched_trackers("stats_logger.*.mode", ("wandb", "swanlab", "trackio")),
    "stats_logger.tensorboard.path": implied(reasons.OWN_OUTPUTS),
    "stats_logger.*": implied("only its tracker reads this"),
    "perf_tracer.enabled": off(reasons.RECORDED),
    "perf_tracer.session_tracer.enabled": off(reasons.RECORDED),
    "perf_tracer.*": implied("only the tracer reads this"),
    "memory_profiler.*": unsupported(reasons.RECORDED),
    "launcher.*": implied(RAY_PLACES),
    "teacher.*": unsupported(
        "AReaL weighs another estimator of the divergence: write the section teacher and actor.distill yourself "
        "(docs/distillation.md)"
    ),
    "server_only": off("a run rolls out and trains"),
    "--config": implied("it names the configuration's file: give that before this one"),
    "workflow": unsupported(reasons.NO_AGENTS),
    "agent*": unsupported(reasons.NO_AGENTS),
}

RULES: Mapping[str, Rule] = {
    **TOP,
    **under("actor.", ACTOR),
    **under("critic.", CRITIC),
    **under("ref.", ENGINE),
    **{f"ref.mb_spec.{name}": to(f"ref.mb_spec.{name}", whole) for name in ("max_tokens_per_mb", "n_mbs")},
    "ref.optimizer*": implied("the reference is not trained"),
    "ref.*": implied("the reference has the actor's kind of model, and is not trained"),
    **under("rollout.", ROLLOUT),
    **for_each(("train_dataset.", "valid_dataset."), DATASET),
    "valid_dataset.batch_size": implied(reasons.ALL_HELD_OUT),
    "valid_dataset.shuffle": implied(reasons.ALL_HELD_OUT),
    **for_each(("sglang.", "vllm."), SGLANG_LIKE),
    **{key: to(key, convert) for key, convert in NATIVE.items()},
}

GIVEN_KEYS: Mapping[str, str] = {"beta": "actor.beta", "loss_type": "actor.loss_type"}
"""Keys of DPO, each with the recipe's."""

GIVEN: Mapping[str, Rule] = {
    **RULES,
    "beta": to(GIVEN_KEYS["beta"], number),
    "loss_type": to(GIVEN_KEYS["loss_type"], one_of(sigmoid="sigmoid", ipo="ipo")),
    "actor.is_critic": implied("the command trains a reward model, or none"),
    "ref.dtype": to("ref.dtype", DTYPE),
    "ref.mb_spec.max_tokens_per_mb": to("ref.mb_spec.max_tokens_per_mb", whole),
    "actor.mb_spec.granularity": implied("both answers of a pair are packed one by one"),
    "ref.mb_spec.granularity": implied("both answers of a pair are packed one by one"),
    **dict.fromkeys(("train_dataset.type", "valid_dataset.type"), implied("the command says what is learnt")),
    **for_each(
        ("rollout.", "gconfig.", "eval_gconfig.", "sglang.", "vllm."), {"*": implied(reasons.NOTHING_GENERATED)}
    ),
}
"""The rules of sources that train on given answers: fine-tuning, DPO and reward models."""
