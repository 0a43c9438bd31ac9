"""Settings that every framework has under names of its own, and that take more than one key to convert."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fivefold.importing.draft import (
    LEADS_NOWHERE,
    Degree,
    Draft,
    Role,
    RolePlan,
    Rule,
    Unfit,
    number,
    one_of,
    whole,
)

NO_CRITIC = "there is no critic: advantages are rewards, normalised over groups or the batch"
NO_REFERENCE = "no reference model is loaded: there is no KL term"
NO_RESUME = "an interrupted run cannot be resumed"
NO_OFFLOAD = "weights, gradients and optimizer states stay on their devices"
NO_LORA = "all weights are trained; LoRA is not offered"
NO_ENGINE_OPTIONS = "an option of the engine: write it in rollout.server_args, as on its command line"
NO_AGENTS = "one prompt has one response: no tools, turns or environments"
NO_PROFILER = "there is no profiler to set"
NO_MULTIMODAL = "models and data are text only"
SYNCHRONOUS = "training is synchronous: each step trains on samples of the newest weights"
ONE_BUDGET = "log-probabilities are computed under the token budget of training, actor.mb_spec.max_tokens_per_mb"
OWN_OUTPUTS = "everything is written below <cluster.fileroot>/<experiment_name>/<trial_name>"
WHOLE_WEIGHTS = (
    "FSDP and ZeRO-3 shard the weights too; Megatron's distributed optimizer, laid out in their place, shards the "
    "optimizer's states only. A large model may need t, p or e: `fivefold plan RECIPE --search` proposes layouts"
)
ON_MEGATRON = "Megatron-Core in its place: the notes say what differs"
NOT_FSDP = "an option of FSDP that training on Megatron-Core has no counterpart of"
WHOLE_IN_PASSES = "weights are whole in forward and backward pass: none is gathered or freed"
ANY_CHECKPOINT = "weights are read from and written to the Hugging Face format, whatever the layout"
OWN_BRIDGE = "Fivefold has one bridge between Hugging Face and Megatron-Core weights, for dense and MoE models"

AGGREGATION = one_of(
    token_mean="token_mean",
    seq_mean_token_mean="sequence_mean",
    seq_mean_token_sum="sequence_sum",
)
ESTIMATOR = one_of(kl="k1", k1="k1", mse="k2", k2="k2", k3="k3", low_var_kl="k3")
SCHEDULE = one_of(constant="constant", constant_with_warmup="constant", linear="linear", cosine="cosine")
DTYPE = one_of(
    bfloat16="bfloat16", bf16="bfloat16", torch_bfloat16="bfloat16", float32="float32", fp32="float32", float="float32"
)
BACKEND = one_of(vllm="vllm", vllm_async="vllm", sglang="sglang", hf="transformers", hf_infer="transformers")


def run_name(value: Any) -> str:
    """A name for a folder: what may not stand in one becomes `-`."""
    name = re.sub(r"[^\w.-]+", "-", str(value)).strip("-.")
    if not name:
        raise Unfit(f"{value!r} holds nothing that a name can be made of")
    return name


def top_k(value: Any) -> int:
    """-1 and numbers beyond any vocabulary mean all tokens: 0."""
    k = whole(value)
    return k if 0 < k < 10_000_000 else 0


def trackers(draft: Draft, key: str) -> None:
    """A tracker or a list of them: the console is always there, TensorBoard is offered."""
    value = draft.get(key)
    names = [str(name).lower() for name in (value if isinstance(value, list) else [value])]
    others = [name for name in names if name not in ("console", "stdout", "tensorboard")]
    if others:
        draft.unsupported(key, f"metrics go to the console, TensorBoard and metrics.jsonl, not to {', '.join(others)}")
    else:
        draft.mapped(key, "stats.tensorboard", "tensorboard" in names)


def one_path(key: str) -> Rule:
    """A file, or a list of them; the recipe takes one file or one folder."""

    def rule(draft: Draft, source: str) -> None:
        value = draft.get(source)
        paths = value if isinstance(value, list) else [value]
        if not paths:
            raise Unfit(f"{value!r} names no file")
        if "${" in str(paths):
            raise Unfit(LEADS_NOWHERE)
        if len(paths) > 1:
            draft.recipe.setdefault(key, str(paths[0]))
            draft.unsupported(
                source, f"{len(paths)} files: only the first is set; put them into one folder and give that as {key}"
            )
        else:
            draft.mapped(source, key, str(paths[0]))

    return rule


def token_budget(draft: Draft, key: str, sequences: Any, length: int | None) -> None:
    """A micro-batch of so many sequences, each as long as it can get, as a number of tokens."""
    if length is None:
        draft.unsupported(key, "sequences have no longest length to turn this into actor.mb_spec.max_tokens_per_mb")
        return
    try:
        count = whole(sequences)
    except Unfit as error:
        draft.unsupported(key, str(error))
        return
    sequences = "1 sequence" if count == 1 else f"{count} sequences"
    note = f"{sequences} of at most {length} tokens; of shorter ones, a micro-batch holds more"
    draft.mapped(key, "actor.mb_spec.max_tokens_per_mb", count * length, note)


def warmup(draft: Draft, key: str, total_steps: int | None) -> None:
    """Warm-up steps, as a share of all steps."""
    steps = draft.read(key, whole)
    if steps <= 0:
        draft.implied(key, "no warm-up in steps")
    elif total_steps is None or total_steps < 1:
        draft.unsupported(
            key,
            "the warm-up is a share of all steps, whose number is not known here: "
            "set actor.optimizer.warmup_steps_proportion",
        )
    else:
        # Not rounded: the trainer counts the steps back, and has to arrive at the same number.
        share = min(1.0, steps / total_steps)
        draft.mapped(key, "actor.optimizer.warmup_steps_proportion", share, f"{steps} of {total_steps} steps")


def min_lr(draft: Draft, key: str, lr_key: str) -> None:
    """The rate where the decay ends, as a share of the peak."""
    peak, least = draft.read(lr_key, number, 1e-6), draft.read(key, number)
    if peak > 0:
        # Short of the last digits, so that 1e-7 of 1e-6 is written 0.1.
        draft.mapped(key, "actor.optimizer.min_lr_ratio", float(f"{least / peak:.12g}"), f"{least:g} of {peak:g}")
    draft.implied(key, f"{lr_key} is 0")


def betas(draft: Draft, key: str) -> None:
    """[beta1, beta2] of Adam."""
    value = draft.get(key)
    if not isinstance(value, list) or len(value) != 2:
        raise Unfit(f"{value!r} is not a list of two numbers")
    beta1, beta2 = map(number, value)
    draft.recipe.setdefault("actor.optimizer.beta2", beta2)
    draft.mapped(key, "actor.optimizer.beta1", beta1, "and actor.optimizer.beta2")


def advantages(draft: Draft, key: str, estimator: str, *, divides_by_std: bool, n_samples: int) -> None:
    """The advantage estimator, as a normalisation of rewards."""
    mean, std = "actor.reward_norm.mean_level", "actor.reward_norm.std_level"
    match estimator:
        case "grpo":
            draft.recipe.setdefault(std, "group" if divides_by_std else "none")
            draft.mapped(key, mean, "group", f"with {std}={draft.recipe[std]}")
        case "rloo" if n_samples > 1:
            # r_i - mean of the others = n / (n - 1) * (r_i - mean of all)
            draft.recipe.setdefault(std, "none")
            draft.recipe.setdefault("actor.reward_scaling", n_samples / (n_samples - 1))
            draft.mapped(key, mean, "group", f"leave-one-out: with {std}=none and rewards times n / (n - 1)")
        case "reinforce_plus_plus" | "reinforceplusplus":
            draft.recipe.setdefault(std, "batch")
            draft.mapped(key, mean, "batch", f"with {std}=batch; over sequences, not weighted by their tokens")
        case "gae" | "ppo":
            draft.unsupported(key, f"{NO_CRITIC}; the recipe trains with GRPO instead")
        case _:
            draft.unsupported(key, f"the estimator {estimator!r} is not offered; the recipe trains with GRPO instead")


def rollout_engine(draft: Draft, key: str) -> None:
    """The engine's name into the rollout's plan; one that is not offered is laid out as vllm."""
    plan = draft.plans.setdefault("rollout", RolePlan())
    value = draft.get(key)
    try:
        plan.backend = BACKEND(value)
        plan.keys[key] = ""
    except Unfit as error:
        plan.backend = "vllm"
        draft.unsupported(key, f"{error}; vllm is laid out in its place")


def read_degrees(draft: Draft, role: Role, keys: Mapping[str, Degree]) -> None:
    """The degrees under `keys` that the source writes, or that hold by default."""
    for key, degree in keys.items():
        if draft.get(key) is not None:
            draft.lay_out(key, role, degree)
