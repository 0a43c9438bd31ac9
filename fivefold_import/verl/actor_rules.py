"""verl's keys of the model, the actor and the reference, which Trinity-RFT's trainer takes over.

Each table holds the keys below one section. Keys that need other keys to be converted are in `tree`.
"""

from __future__ import annotations

from collections.abc import Mapping

from fivefold_import import megatron, profiling, reasons
from fivefold_import.algorithms import loss_by_name, option_of_loss
from fivefold_import.checkpoints import loaded_contents, weights_in_checkpoints
from fivefold_import.corrections import truncated_weights
from fivefold_import.draft import Draft, Rule
from fivefold_import.rules import if_on, implied, moments_on_host, off, only, to, under, unknown, unsupported
from fivefold_import.settings import betas
from fivefold_import.values import DTYPE, LOSS_AGGREGATION, LR_SCHEDULE, STATE_PLACE, flag, number, text, whole
from fivefold_import.verl import initial_weights

ACTOR = "actor_rollout_ref.actor."
REF = "actor_rollout_ref.ref."
MODEL = "actor_rollout_ref.model."
OVERRIDE = "megatron.override_transformer_config."

OPTIMIZER_OPTIONS = "the optimizer"

OFFLOADING: Mapping[str, Rule] = {
    "param_offload": off(reasons.NO_OFFLOAD),
    "grad_offload": off(reasons.NO_OFFLOAD),
    "optimizer_offload": off(reasons.NO_OFFLOAD),
    "offload_policy": off(reasons.NO_OFFLOAD),
}
"""Offloading of the reference model."""
ACTOR_OFFLOADING: Mapping[str, Rule] = {
    "param_offload": if_on("actor.offload.params", reasons.PLAN_OFFLOADS),
    "grad_offload": if_on("actor.offload.grads", reasons.PLAN_OFFLOADS),
    "optimizer_offload": if_on("actor.offload.optimizer", reasons.PLAN_OFFLOADS),
}
"""Offloading of the actor while responses are generated."""


def _forward_prefetch(draft: Draft, source: str) -> None:
    """Convert the switch with which FSDP gathers the next layer early."""
    if flag(draft.get(source)):
        draft.mapped(source, "actor.fsdp.forward_prefetch", 1)
    else:
        draft.implied(source, reasons.LAYER_UNITS)


AGGREGATION = "loss_agg_mode"
MODE = "policy_loss.loss_mode"
OVER_SEQUENCES = ("gspo", "geo_mean", "sapo")
"""Losses that are means over sequences whatever `loss_agg_mode` says."""


def _is_over_sequences(draft: Draft, section: str) -> bool:
    return str(draft.get(section + MODE)).lower().replace("-", "_") in OVER_SEQUENCES


def _loss(draft: Draft, source: str) -> None:
    """Convert the key that chooses the loss, with the aggregation that some losses have of their own."""
    loss_by_name("vanilla", "bypass_mode")(draft, source)
    if _is_over_sequences(draft, source.removesuffix(MODE)):
        draft.recipe["actor.loss_aggregation"] = "sequence_mean"
        draft.revise("actor.loss", draft.recipe["actor.loss"], "with actor.loss_aggregation=sequence_mean, as there")


def _aggregation(draft: Draft, source: str) -> None:
    """Convert how the costs of tokens become one number."""
    section = source.removesuffix(AGGREGATION)
    if _is_over_sequences(draft, section):
        draft.implied(source, f"{section}{MODE}={draft.get(section + MODE)} is the mean over sequences in any case")
    else:
        to("actor.loss_aggregation", LOSS_AGGREGATION)(draft, source)


ONE_SHARDING = only(-1, holds=reasons.STATES_SHARDED, otherwise=f"{reasons.STATES_SHARDED}, not over groups of them")

ENGINE: Mapping[str, Rule] = {
    **under("megatron.", OFFLOADING),
    **under("fsdp_config.", OFFLOADING),
    **OFFLOADING,
    "megatron.sequence_parallel": megatron.TRANSFORMER["sequence_parallel"],
    "megatron.use_distributed_optimizer": megatron.TRANSFORMER["use_distributed_optimizer"],
    "megatron.seed": implied(reasons.ONE_SEED),
    "megatron.use_mbridge": implied(reasons.OWN_BRIDGE),
    "megatron.vanilla_mbridge": implied(reasons.OWN_BRIDGE),
    "megatron.use_remove_padding": implied(reasons.ALWAYS_PACKED),
    "megatron.pad_*": implied(reasons.ALWAYS_PACKED),
    "megatron.override_mcore_model_config": implied("the section is empty"),
    "megatron.extra": implied("the section is empty"),
    "megatron.*": unknown("Megatron-Core"),
    "fsdp_config.fsdp_size": ONE_SHARDING,
    "fsdp_config.wrap_policy.*": implied(reasons.LAYER_UNITS),
    "fsdp_config.forward_prefetch": implied(reasons.LAYER_UNITS),
    "fsdp_config.reshard_after_forward": implied("it matters in training only"),
    "fsdp_config.model_dtype": implied("master weights are float32"),
    "fsdp_config.use_torch_compile": implied(reasons.KERNELS),
    "fsdp_config.entropy_*": implied(reasons.CHUNKED_LOGPROBS),
    "fsdp_config.*": unsupported(reasons.NOT_FSDP),
    "strategy": implied("the reference runs on the actor's engine"),
    "use_torch_compile": implied(reasons.KERNELS),
    "use_fused_kernels": implied(reasons.KERNELS),
    "use_remove_padding": implied(reasons.ALWAYS_PACKED),
    "entropy_checkpointing": implied(reasons.CHUNKED_LOGPROBS),
    "entropy_from_logits_*": implied(reasons.CHUNKED_LOGPROBS),
    "load_weight": implied("weights are always loaded"),
    "router_replay.*": unsupported(reasons.NO_ROUTER_REPLAY),
    **profiling.OF_ACTOR,
    "ulysses_sequence_parallel_size": only(1, holds="contexts are not split", otherwise=reasons.SPLIT_CONTEXTS),
    "fsdp_size": ONE_SHARDING,
    "grad_norm_threshold": implied("a step whose gradient is not finite is skipped; other gradients are clipped"),
    "log_prob_*": implied(reasons.ONE_BUDGET),
}
"""Keys that the actor and the reference both have."""

OPTIMIZER: Mapping[str, Rule] = {
    "lr": to("actor.optimizer.lr", number),
    "weight_decay": to("actor.optimizer.weight_decay", number),
    "betas": betas,
    "eps": to("actor.optimizer.eps", number),
    "clip_grad": to("actor.optimizer.gradient_clipping", number),
    "optimizer": only("adam", "adamw", "AdamW", holds=reasons.ADAMW),
    "optimizer_type": only("adam", "adamw", "AdamW", holds=reasons.ADAMW),
    "optimizer_impl": implied(reasons.ADAMW),
    "lr_warmup_steps_ratio": to("actor.optimizer.warmup_steps_proportion", number),
    "lr_warmup_init": only(0, holds="the warm-up begins at 0"),
    "lr_decay_style": to("actor.optimizer.lr_scheduler_type", LR_SCHEDULE),
    "lr_scheduler_type": to("actor.optimizer.lr_scheduler_type", LR_SCHEDULE),
    "warmup_style": to("actor.optimizer.lr_scheduler_type", LR_SCHEDULE),
    "min_lr_ratio": to("actor.optimizer.min_lr_ratio", number),
    "lr_decay_steps": unsupported("the rate decays over all steps"),
    "num_cycles": only(0.5, holds="a cosine decay is half a cosine"),
    "total_training_steps": implied("the number of steps is counted from the data"),
    "zero_indexed_step": implied("no step is lost at rate 0"),
    "weight_decay_incr_style": only("constant", holds="the weight decay is constant"),
    "lr_wsd_*": implied("only the schedule wsd reads this"),
    "use_checkpoint_opt_param_scheduler": implied(reasons.RECIPES_SCHEDULE),
    "use_precision_aware_optimizer": implied(reasons.EACH_STATE),
    "override_optimizer_config.decoupled_weight_decay": to("actor.megatron.optimizer.decoupled_weight_decay", flag),
    "override_optimizer_config.apply_wd_to_qk_layernorm": to("actor.megatron.optimizer.apply_wd_to_qk_layernorm", flag),
    "override_optimizer_config.optimizer_cpu_offload": to("actor.megatron.optimizer.state_on", STATE_PLACE),
    "override_optimizer_config.optimizer_offload_fraction": only(
        0, 0.0, 1, 1.0, holds="state_on is for all of the state", otherwise="all of the state is on one side"
    ),
    "override_optimizer_config.optimizer_*": off(reasons.NO_OFFLOAD),
    **under("override_optimizer_config.", megatron.OPTIMIZER_STATE),
    "override_optimizer_config.overlap_cpu*": implied("only an offloaded optimizer reads this"),
    "override_optimizer_config.*": unknown(OPTIMIZER_OPTIONS),
    "*": unknown(OPTIMIZER_OPTIONS),
}


ACTOR_RULES: Mapping[str, Rule] = {
    **ENGINE,
    **under("megatron.", ACTOR_OFFLOADING),
    **under("fsdp_config.", ACTOR_OFFLOADING),
    **ACTOR_OFFLOADING,
    **initial_weights.actor_rules(),
    **under(OVERRIDE, megatron.TRANSFORMER),
    **under("megatron.override_ddp_config.", megatron.DDP),
    "megatron.param_dtype": to("actor.dtype", DTYPE),
    "megatron.dtype": to("actor.dtype", DTYPE),
    "fsdp_config.dtype": to("actor.dtype", DTYPE),
    "fsdp_config.reshard_after_forward": to("actor.fsdp.reshard_after_forward", flag),
    "fsdp_config.forward_prefetch": _forward_prefetch,
    "fsdp_config.offload_policy": moments_on_host,
    **under("optim.", OPTIMIZER),
    "grad_clip": to("actor.optimizer.gradient_clipping", number),
    "entropy_coeff": to("actor.entropy_coeff", number),
    "clip_ratio_c": to("actor.c_clip", number),
    "ppo_epochs": to("actor.ppo_epochs", whole),
    AGGREGATION: _aggregation,
    "loss_scale_factor": to("actor.loss_length", whole),
    "shuffle": only(True, holds="mini-batches are always drawn at random, by the seed"),
    "data_loader_seed": implied(reasons.ONE_SEED),
    "ppo_micro_batch_size": unsupported("a micro-batch over all devices has no fixed size; set actor.mb_spec"),
    MODE: _loss,
    "tis_imp_ratio_cap": truncated_weights,
    "checkpoint.async_save": implied(reasons.IN_BACKGROUND),
    **dict.fromkeys(
        ("checkpoint.save_contents", "checkpoint.contents"),
        weights_in_checkpoints("trainer.save_freq", "trainer.max_actor_ckpt_to_keep"),
    ),
    "checkpoint.load_contents": loaded_contents(ACTOR + "checkpoint.save_contents"),
    "checkpoint.*": unknown("checkpoints"),
    "recompute_old_log_prob": to("actor.recompute_logprob", flag),
    "use_cpgd_loss": loss_by_name(False, name="cpgd"),
    "calculate_entropy": implied("the entropy is in every step's metrics"),
    "rollout_n": implied("it follows from rollout.n"),
    "use_prefix_grouper": off("responses of a prompt do not share its computation in training"),
    "freeze_vision_tower": off(reasons.NO_MULTIMODAL),
    "use_rollout_log_probs": off("old log-probabilities are the trainer's"),
    "calculate_sum_pi_squared": off("only an optimal baseline reads this"),
}

LOSS_OPTIONS: Mapping[str, tuple[str, str, str, tuple[object, ...]]] = {
    **{
        f"policy_loss.{name}": (name, "clip_cov", MODE, ("clip_cov", "clip-cov"))
        for name in ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub")
    },
    **{f"policy_loss.{name}": (name, "kl_cov", MODE, ("kl_cov", "kl-cov")) for name in ("kl_cov_ratio", "ppo_kl_coef")},
    **{name: (name, "sapo", MODE, ("sapo",)) for name in ("tau_pos", "tau_neg")},
    "policy_drift_coeff": ("drift", "cpgd", "use_cpgd_loss", (True,)),
}
"""Options of other losses than PPO's: the option, its loss, the key that chooses the loss, and the key's values."""


def loss_options(section: str) -> dict[str, Rule]:
    """Return the rules for the options of other losses, which have no effect while PPO's is chosen.

    Args:
        section: where the actor's keys stand.
    """
    return {
        section + key: option_of_loss(option, loss, section + switch, *values)
        for key, (option, loss, switch, values) in LOSS_OPTIONS.items()
    }


REFERENCE_RULES: Mapping[str, Rule] = {
    **ENGINE,
    **initial_weights.reference_rules(ACTOR),
    **dict.fromkeys(
        (
            OVERRIDE + "*",
            "megatron.override_ddp_config.*",
            "megatron.param_dtype",
            "megatron.dtype",
            "fsdp_config.dtype",
        ),
        implied(megatron.AS_ACTOR),
    ),
    "*": unknown("the reference"),
}

MODEL_RULES: Mapping[str, Rule] = {
    "path": to("actor.path", text),
    "tokenizer_path": to("tokenizer_path", text),
    "trust_remote_code": off(reasons.NO_REMOTE_CODE),
    "use_remove_padding": implied(reasons.ALWAYS_PACKED),
    "use_fused_kernels": implied(reasons.KERNELS),
    "fused_kernel_options.*": implied(reasons.KERNELS),
    "use_liger": implied(reasons.KERNELS),
    "use_shm": implied("weights are read from the folder that holds them"),
    "cache_dir": implied("the Hugging Face cache is where its environment variables say"),
    "model_revision": only("main", holds="the newest revision of a hub name is read"),
    "external_lib": off("no code is imported besides the reward's"),
    "gradient_checkpointing_kwargs.*": unsupported(megatron.CHECKPOINT),
    "enable_activation_offload": off("activations stay on their devices"),
    "lora_rank": off(reasons.NO_LORA),
    "lora.rank": off(reasons.NO_LORA),
    "lora*": implied(reasons.ONLY_LORA),
    "target_modules": implied(reasons.ONLY_LORA),
    "exclude_modules": implied(reasons.ONLY_LORA),
    "mtp.enable*": off("multi-token prediction is not offered"),
    "mtp.*": implied("only multi-token prediction reads this"),
    "model_type": only("llm", holds="the model is a language model", otherwise=reasons.NO_MULTIMODAL),
    "override_config": implied("the section is empty"),
    "override_config.*": unsupported("the model's own config.json describes it"),
    "*": unknown("the model"),
}
