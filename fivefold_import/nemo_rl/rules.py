"""NeMo-RL's tables, and the rules of single keys that take more than a lookup."""

from __future__ import annotations

import re
from collections.abc import Mapping

from fivefold.config.schema.run import should_fall
from fivefold.families.registry import find_family
from fivefold_import import megatron, reasons
from fivefold_import.agents import has_turns, player
from fivefold_import.critic import has_critic
from fivefold_import.draft import Draft
from fivefold_import.models import is_moe, known_shape
from fivefold_import.settings import TRACKERS, min_lr, warmup
from fivefold_import.tables import Table, read_tables
from fivefold_import.values import DTYPE, LR_SCHEDULE, Unfit, number, whole

MANY = 100_000
"""As many steps or epochs as nobody means to train: a limit that another one ends before."""
SECTIONS = ("grpo.", "ppo.", "distillation.", "sft.", "dpo.", "rm.")
WARMS_FROM_0 = "no step has rate 0: the first of the warm-up has the rate / its steps"
SCHEDULES = {"ConstantLR": "constant", "CosineAnnealingLR": "cosine", "LinearLR": "linear"}
"""torch's schedules, by the last part of their names."""
METRICS = {
    "val:accuracy": "eval/accuracy",
    "val:total_reward/mean": "eval/reward",
    "val:val_loss": "eval/nll",
    "val:validation-default_loss": "eval/loss",
    "train:total_reward/mean": "reward/mean",
    "train:loss": "loss",
}
"""Metrics by which checkpoints are kept."""


def section_of_task(draft: Draft) -> str:
    """Return the section of the algorithm, with a dot at its end."""
    return next((section for section in SECTIONS if draft.keys(f"{section}*")), "grpo.")


# Steps and schedules


def _passes_of_run(draft: Draft) -> int | None:
    """Return the passes over samples in the whole run, by which NeMo-RL counts its schedules, however many updates each
    has; None if the source does not limit its steps.
    """
    steps = draft.recipe.get("total_train_steps")
    return steps * draft.read("ppo.ppo_epochs", whole, 1) if steps else None


def _warmup(draft: Draft, source: str) -> None:
    updates = draft.recipe.get(draft.target("actor.ppo_n_minibatches"), 1)
    warmup(draft, source, _passes_of_run(draft), updates=updates)


def convert_steps(draft: Draft, section: str) -> None:
    """Convert the limits of a run, which ends at the first that it reaches."""
    steps_key, epochs_key = f"{section}max_num_steps", f"{section}max_num_epochs"
    steps, epochs = draft.get(steps_key), draft.get(epochs_key)
    is_endless = isinstance(epochs, int) and epochs <= 0
    if isinstance(steps, int) and (0 < steps < MANY or (is_endless and steps > 0)):
        draft.sets(steps_key, "total_train_steps", steps)
        if is_endless:
            draft.implied(epochs_key, f"{steps_key} ends the run")
        elif epochs is not None:
            draft.implied(epochs_key, f"{steps_key} ends the run")
            draft.notes.append(
                f"total_train_steps={steps}: NeMo-RL ends earlier if {epochs} passes over the data are fewer steps"
            )
    elif isinstance(epochs, int) and epochs > 0:
        draft.sets(epochs_key, "total_train_epochs", epochs)
    draft.implied(steps_key, f"{epochs_key} ends the run")


def convert_switches(draft: Draft, section: str) -> None:
    """Convert the switches of checkpoints, which are off in Fivefold by another key, and of training ahead."""
    writes, ahead = "checkpointing.enabled", f"{section}async_{section}"
    if draft.get(writes) is False:
        draft.sets(writes, "recover.mode", "disabled")
    if draft.get(f"{ahead}enabled") is True:
        draft.assume({f"{ahead}max_trajectory_age_steps": 1})


def _section(key: str) -> str:
    """Return what precedes `megatron_cfg.`, `scheduler.` or the like in a key: `policy.`, or the like."""
    return key.partition(".")[0] + "."


def _warmup_iters(draft: Draft, source: str) -> None:
    _warmup(draft, source)


def _warmup_init(draft: Draft, source: str) -> None:
    at = source.removesuffix("scheduler.lr_warmup_init")
    steps, peak = draft.read(f"{at}scheduler.lr_warmup_iters", whole, 0), draft.read(f"{at}optimizer.lr", number, 0)
    _first_rate(draft, source, steps, draft.read(source, number) / peak if peak else 0.0)


def _first_rate(draft: Draft, source: str, steps: int, share: float) -> None:
    """Convert the rate at which a warm-up begins, as a share of the peak."""
    if steps == 0:
        draft.implied(source, "nothing is warmed up")
    elif share == 0:
        draft.implied(source, WARMS_FROM_0)
    else:
        draft.mapped(source, "actor.optimizer.warmup_start_ratio", round(share, 12))


def _decay_iters(draft: Draft, source: str) -> None:
    at = source.removesuffix("lr_decay_iters")
    if draft.get(f"{at}lr_decay_style", "constant") == "constant":
        draft.implied(source, "the learning rate is constant")
    elif draft.get(source) == _passes_of_run(draft):
        draft.implied(source, "the rate decays over all steps")
    else:
        draft.unsupported(source, "the rate decays over all steps")


def _min_lr(draft: Draft, source: str) -> None:
    min_lr(draft, source, source.replace("min_lr", "lr"))


def _scheduler(draft: Draft, source: str) -> None:
    """Convert torch's schedules in sequence: a linear warm-up, and what follows it."""
    section = source.partition("scheduler.")[0] + "scheduler."
    place, _, name = source.removeprefix(section).partition(".")
    items = _schedules(draft, section)
    kind = items.get(int(place)) if place.isdigit() else None
    first = items.get(0)
    warms = first == "LinearLR" and len(items) > 1
    steps = draft.read(f"{section}0.kwargs.total_iters", whole, 0) if warms else 0
    if name == "milestones":
        expected = [steps] if len(items) > 1 else []
        if draft.get(source) == expected:
            draft.implied(source, "one schedule follows the other after the warm-up")
        draft.unsupported(source, f"the schedules change after the warm-up's {steps} steps")
    elif kind is None or len(items) > 2 or (len(items) == 2 and not warms):
        draft.unsupported(source, "the learning rate warms up, then is constant or decays in one way")
    elif warms and place == "0":
        _warmup_of_torch(draft, source, name, steps, section)
    else:
        _decay_of_torch(draft, source, name, kind, steps, section)


def _schedules(draft: Draft, section: str) -> dict[int, str]:
    """Return the schedules of a sequence by their places."""
    names = draft.keys(f"{section}*.name")
    return {
        int(key.split(".")[-2]): str(draft.get(key)).rpartition(".")[2] for key in names if key.split(".")[-2].isdigit()
    }


def _warmup_of_torch(draft: Draft, source: str, name: str, steps: int, section: str) -> None:
    if name == "kwargs.total_iters":
        _warmup(draft, source)
    elif name == "kwargs.start_factor":
        _first_rate(draft, source, steps, number(draft.get(source)))
    elif name == "kwargs.end_factor" and number(draft.get(source)) != 1:
        draft.unsupported(source, "the warm-up ends at the rate itself")
    draft.implied(source, f"{section}0.kwargs.total_iters has the warm-up")


def _decay_of_torch(draft: Draft, source: str, name: str, kind: str, warmed: int, section: str) -> None:
    at = source.removesuffix(name)
    total = _passes_of_run(draft)
    ends = (total - warmed) if total is not None else None
    if kind not in SCHEDULES:
        draft.unsupported(source, f"the schedule {kind} is not offered: constant, linear or cosine")
    elif name == "name":
        draft.mapped(source, "actor.optimizer.lr_scheduler_type", LR_SCHEDULE(SCHEDULES[kind]))
    elif kind == "ConstantLR":
        if name == "kwargs.factor" and number(draft.get(source)) != 1:
            draft.unsupported(source, "the rate is constant: write it in the optimizer's lr")
        draft.implied(source, "the rate is constant")
    elif name in ("kwargs.T_max", "kwargs.total_iters"):
        if draft.get(source) == ends:
            draft.implied(source, "the rate decays over all steps")
        draft.unsupported(source, "the rate decays over all steps")
    elif name == "kwargs.eta_min":
        min_lr(draft, source, f"{section.removesuffix('scheduler.')}optimizer.kwargs.lr")
    elif name == "kwargs.end_factor" and draft.get(f"{at}kwargs.start_factor", 1.0) == 1:
        draft.mapped(source, "actor.optimizer.min_lr_ratio", number(draft.get(source)))
    elif name == "kwargs.start_factor" and number(draft.get(source)) == 1:
        draft.implied(source, "the decay begins at the rate itself")
    draft.unsupported(source, f"this option of {kind} is not among those that are converted")


# Weights


def _most_norm(draft: Draft, source: str) -> None:
    draft.mapped(source, "actor.optimizer.gradient_clipping", number(draft.get(source)))


def _offloaded_share(draft: Draft, source: str) -> None:
    is_on = draft.get(source.replace("optimizer_offload_fraction", "optimizer_cpu_offload")) is True
    if is_on and number(draft.get(source)) != 1:
        draft.unsupported(source, "all of the optimizer's state is on one side")
    draft.implied(source, "all of the optimizer's state is on one side")


def _frozen_routers(draft: Draft, source: str) -> None:
    """Convert a switch that freezes the routers, whose names follow from the model's family."""
    if draft.get(source) is not True:
        return draft.implied(source, "routers are trained, as by default")
    shape = known_shape(str(draft.get("policy.model_name", "")))
    names = find_family(shape.family).moe if shape is not None else None
    if names is None:
        return draft.unsupported(source, "name the routers' weights in actor.freeze (docs/lora.md#frozen-weights)")
    if any(key.startswith(draft.target("actor.lora.")) for key in draft.recipe):
        return draft.implied(source, "adapters alone are trained")
    return draft.mapped(source, "actor.freeze", [f"*.{names.router}"])


def _bias_rate(draft: Draft, source: str) -> None:
    """Map the step of the routers' offsets, which only some families have."""
    rate = number(draft.get(source))
    shape = known_shape(str(draft.get(_section(source) + "model_name", "")))
    enabled = draft.get(source.replace("bias_update_rate", "enable_expert_bias"))
    if rate and (enabled if shape is None else shape.router_bias):
        draft.mapped(source, "actor.megatron.transformer.moe_router_bias_update_rate", rate)
    draft.implied(source, "the routers have no offsets, or they stay as they are")


def _predicted_tokens(draft: Draft, source: str) -> None:
    """Report layers that predict further tokens: without a weight in the loss, they change nothing."""
    weight = draft.get(source.replace("mtp_num_layers", "mtp_loss_scaling_factor"), 0)
    if draft.get(source) and weight:
        draft.unsupported(source, reasons.NOT_TRAINED)
    draft.implied(source, "no further tokens are predicted")


def _precision(draft: Draft, source: str) -> None:
    """Convert the number format of the rollout, whose weights may be quantised by blocks."""
    name = draft.get(source)
    if name == "fp8" and draft.get(source.replace("precision", "is_mx")) is not True:
        draft.mapped(source, "rollout.quantization", "fp8_per_block", "by blocks of 128 x 128, as there")
    draft.mapped(source, "rollout.dtype", DTYPE(name))


def _deep_gemm(draft: Draft, source: str) -> None:
    """Convert the switch of vLLM's kernels for weights in FP8, which NeMo-RL sets as environment variables."""
    section = source.removesuffix("use_deep_gemm")
    if draft.get(source) is True and draft.get(f"{section}precision") == "fp8" and not draft.get(f"{section}is_mx"):
        variables = "scheduler.environment.rollout.VLLM_USE_DEEP_GEMM"
        draft.recipe[f"{variables}_E8M0"] = "0"
        draft.mapped(source, variables, "1", f"with {variables}_E8M0=0")
    draft.implied(source, "only weights in FP8 read this")


def _tokenizer(draft: Draft, source: str) -> None:
    if draft.get(source) == draft.get("policy.model_name"):
        draft.implied(source, "it is the model's")
    draft.mapped(source, "tokenizer_path", str(draft.get(source)))


def _template(draft: Draft, source: str) -> None:
    """Convert a chat template: Jinja's text or a file; `default` is the tokenizer's own."""
    template = draft.get(source)
    if template == "default":
        draft.implied(source, "it is the tokenizer's")
    elif not isinstance(template, str):
        raise Unfit(f"{template!r} is neither a template nor a file")
    else:
        draft.mapped(source, "chat_template", template)


def _own_router_loss(draft: Draft, source: str) -> None:
    """Convert a model's own weight of the auxiliary loss: 0 is what holds without one."""
    if number(draft.get(source)) == 0:
        draft.implied(source, "without actor.megatron.transformer.moe_aux_loss_coeff, there is no auxiliary loss")
    elif draft.plans["actor"].backend == "megatron" and is_moe(str(draft.get("policy.model_name", ""))):
        draft.mapped(source, "actor.megatron.transformer.moe_aux_loss_coeff", number(draft.get(source)))
    draft.implied(source, "only the router of a mixture of experts reads this")


# The run


def _rounds(draft: Draft, source: str) -> None:
    if draft.get(source.replace("dynamic_sampling_max_gen_batches", "use_dynamic_sampling")) is True:
        note = "prompts without signal fill what is missing then; in NeMo-RL it is an error"
        draft.mapped(source, "actor.dynamic_sampling_max_rounds", whole(draft.get(source)), note)
    draft.implied(source, "dynamic sampling is switched off")


def _last_answer(draft: Draft, source: str) -> None:
    """Convert what of a conversation is learned: all answers, or the last one."""
    if draft.get(source) is True and "train_dataset.messages_key" in draft.recipe:
        draft.mapped(source, "train_dataset.mask_history", True)
    draft.implied(source, "all answers of a conversation are learned, as by default, or a row has one")


def _turns(draft: Draft, source: str) -> None:
    draft.implied(source, reasons.ONE_COMPLETION if not has_turns(draft) else "the agent ends its episodes itself")


def _save_by(draft: Draft, source: str) -> None:
    """Convert a time since the start, `days:hours:minutes:seconds`."""
    match = re.fullmatch(r"(\d+):(\d+):(\d+):(\d+)", str(draft.get(source)))
    if match is None:
        raise Unfit(f"{draft.get(source)!r} is not days:hours:minutes:seconds")
    days, hours, minutes, seconds = map(int, match.groups())
    draft.mapped(source, "recover.save_before", float(((days * 24 + hours) * 60 + minutes) * 60 + seconds))


def _best(draft: Draft, source: str) -> None:
    """Convert the metric by which checkpoints are kept: the best one, and the newest ones besides."""
    name = str(draft.get(source))
    metric = METRICS.get(name)
    is_higher_better = draft.get("checkpointing.higher_is_better", True) is True
    if name.startswith("val:") and not {"valid_dataset.path", "train_dataset.hold_out"} & set(draft.recipe):
        draft.implied(source, "without held-out prompts, nothing is evaluated")
    elif metric is not None and should_fall(metric) is not is_higher_better:
        note = "and the newest recover.max_to_keep; NeMo-RL keeps no others than the best"
        draft.mapped(source, "recover.keep_best", metric, note)
    draft.unsupported(
        source,
        "the newest checkpoints are kept: recover.keep_best names a metric of Fivefold's, by which the best one is too",
    )


def _trackers(draft: Draft, source: str) -> None:
    names = [name for name in TRACKERS if draft.get(f"logger.{name}_enabled") is True]
    if draft.get(source) is True and source.removeprefix("logger.").removesuffix("_enabled") not in TRACKERS:
        draft.unsupported(source, f"stats.trackers takes {', '.join(TRACKERS)}")
    if draft.get(source) is True or (not names and source == "logger.tensorboard_enabled"):
        draft.mapped(source, "stats.trackers", names)
    draft.implied(source, "it is switched off")


def _streams(draft: Draft, source: str) -> None:
    """Convert the options of NeMo-RL's single controller; one bounds the age of samples."""
    name = source.removeprefix("async_rl.")
    if name == "sampler.max_staleness_versions":
        draft.mapped(source, "rollout.max_head_offpolicyness", whole(draft.get(source)))
    elif name in ("max_inflight_prompts", "max_buffered_rollouts"):
        draft.implied(source, reasons.AHEAD)
    elif name == "recompute_kv_cache_after_weight_updates":
        draft.mapped(source, "rollout.recompute_kv_cache", draft.get(source))
    elif name == "sampler.name" and draft.get(source) == "windowed":
        draft.implied(source, reasons.AHEAD)
    draft.unsupported(source, "this option of NeMo-RL's single controller has no counterpart (docs/async.md)")


def _critic_first(draft: Draft, source: str) -> None:
    if has_critic(draft):
        draft.mapped(source, "critic.warmup_steps", whole(draft.get(source)))
    draft.implied(source, "there is no critic")


# Environments


def _gym(draft: Draft, source: str) -> None:
    if player(draft) != "agent":
        draft.implied(source, "only NeMo Gym reads this, and no data are judged by it")
    draft.unsupported(source, reasons.WRITE_AGENT if source == "env.nemo_gym.config_paths" else reasons.OWN_VALUES)


def _environments(draft: Draft, source: str) -> None:
    """Report options of environments: those that judge no data have no effect."""
    value = draft.get(source)
    name = source.split(".")[1]
    if name in ("should_use_nemo_gym", "should_log_nemo_gym_responses"):
        draft.implied(source, "environment.agent plays the episodes, and samples.jsonl has them")
    used = draft.get("data.train.env_name", draft.get("data.default.env_name", "math"))
    if value in (False, None, {}, []):
        draft.implied(source, "it is switched off")
    elif source.startswith("env.") and source.count(".") > 1 and name != used:
        draft.implied(source, f"no data are judged by {name}")
    elif name == "sliding_puzzle_game":
        draft.unsupported(source, reasons.OWN_VALUES)
    elif source.startswith("env.reward_model."):
        draft.unsupported(source, "the section reward.model has the reward model's keys (docs/rewards.md)")
    draft.unsupported(source, reasons.OWN_REWARD)


TABLES: Mapping[str, Table] = read_tables("nemo_rl", globals(), {"megatron": megatron.TABLES})
