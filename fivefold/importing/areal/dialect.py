"""AReaL: YAML and dotted overrides. Its keys are Fivefold's own where they mean the same."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fivefold.importing import megatron
from fivefold.importing.areal.rules import RULES
from fivefold.importing.dialect import Dialect
from fivefold.importing.draft import Draft, flag, number, positive, whole
from fivefold.importing.meanings import NO_REFERENCE, ON_MEGATRON, WHOLE_WEIGHTS

MEAN, STD = "actor.reward_norm.mean_level", "actor.reward_norm.std_level"
TRAINERS = ("fsdp", "megatron", "archon")
TRAINER = re.compile(rf"\b(?:{'|'.join(TRAINERS)})\b")
NO_BACKEND = re.compile(r"(?:[dtpce]\d+)+")

DEFAULTS: Mapping[str, Any] = {
    "actor.optimizer.lr": 1e-3,
    "actor.optimizer.warmup_steps_proportion": 0.001,
    "actor.ppo_n_minibatches": 4,
    "actor.recompute_logprob": False,
    "actor.reward_clip": 20.0,
    "gconfig.n_samples": 1,
    "gconfig.max_new_tokens": 16384,
    "train_dataset.batch_size": 1,
    "cluster.n_nodes": 32,
    "cluster.n_gpus_per_node": 8,
}


def convert(draft: Draft) -> None:
    """Everything that takes several keys, then the rest key by key."""
    trainers = _backends(draft)
    _advantages(draft)
    _kl(draft)
    _unused(draft, trainers)
    _recompute(draft, trainers)
    _decoupled(draft)
    _repeated(draft)
    _engines(draft)
    _evaluation(draft)
    draft.apply(RULES)
    if "train_dataset.path" in draft.recipe:
        draft.notes.append(
            "AReaL knows its data sets' columns by their names; set prompt_key and answer_key of train_dataset and "
            "valid_dataset, unless they have the columns prompt and reward_model"
        )


# Layout


def _backends(draft: Draft) -> set[str]:
    """One string for all roles, or one for each; older strings leave the training backend out.

    Returns:
        The engines that the source trains with.
    """
    trainers: set[str] = set()
    if draft.get("allocation_mode"):
        trainer = str(draft.get("actor.backend", ""))
        allocation = modern(str(draft.get("allocation_mode")), trainer if trainer in TRAINERS else None)
        trainers |= _map_layout(draft, "allocation_mode", allocation)
        for key in ("actor.backend", "rollout.backend"):
            if NO_BACKEND.search(str(draft.get(key, ""))) is None:
                draft.implied(key, "allocation_mode rules")
    for role in ("actor", "rollout"):
        key = f"{role}.backend"
        if draft.is_open(key) and draft.get(key):
            trainers |= _map_layout(draft, key, modern(str(draft.get(key))))
    if draft.get("ref.backend") and draft.read("actor.kl_ctl", number, 0.1) > 0:
        value = modern(str(draft.get("ref.backend")))
        if on_megatron(value) == draft.recipe.get("actor.backend"):
            draft.implied("ref.backend", "as the actor, in whose processes the reference runs")
        _map_layout(draft, "ref.backend", value)
    draft.implied("ref.backend", NO_REFERENCE)
    _colocation(draft)
    # An actor that nothing lays out gets the recipe's default, one Megatron worker.
    return trainers or {"megatron"}


def _map_layout(draft: Draft, key: str, layout: str) -> set[str]:
    """`key` becomes `layout`, trained on Megatron-Core; returns what the source trains with."""
    trainers = set(TRAINER.findall(layout))
    is_other = bool(trainers - {"megatron"})
    draft.mapped(key, key, on_megatron(layout), ON_MEGATRON if is_other else "")
    if is_other and WHOLE_WEIGHTS not in draft.notes:
        draft.notes.append(WHOLE_WEIGHTS)
    return trainers


def on_megatron(layout: str) -> str:
    """The layout with every trainer's degrees handed to Megatron-Core."""
    return TRAINER.sub("megatron", layout)


def modern(allocation: str, trainer: str | None = None) -> str:
    """`sglang.d4p1t1+d2t2` as `sglang:d4+fsdp:d2t2`: backends named, degrees of 1 left out where no role needs them.

    `trainer` is the training backend of a part that names none.
    """
    return re.sub(r"[^+|()]+", lambda match: _modern_role(match[0], trainer), allocation.strip())


def _modern_role(role: str, trainer: str | None) -> str:
    role = re.sub(r"^(sglang|vllm)\.", r"\1:", role)
    if NO_BACKEND.fullmatch(role):
        # Pipeline and expert degrees have always needed Megatron-Core.
        needed = "megatron" if re.search(r"[pe](?!1(?![0-9]))", role) else "fsdp"
        role = f"{trainer or needed}:{role}"
    backend, colon, degrees = role.partition(":")
    if backend.partition("[")[0] in ("sglang", "vllm", "fsdp") and NO_BACKEND.fullmatch(degrees):
        degrees = re.sub(r"[tpce]1(?![0-9])", "", degrees) or "d1"
    return f"{backend}{colon}{degrees}"


def _colocation(draft: Draft) -> None:
    """Roles stand apart unless one is told to share another's devices."""
    for role, other in (("actor", "rollout"), ("rollout", "actor")):
        key, target = f"{role}.scheduling_strategy.type", f"{role}.scheduling_strategy.target"
        if draft.get(key) == "colocation" and draft.get(target) == other:
            draft.mapped(key, "rollout.colocate", True)
            draft.implied(target, f"follows from {key}")
        draft.implied(key, "roles stand apart where the cluster has room")
    for key in draft.keys("ref.scheduling_strategy*"):
        draft.implied(key, "the reference runs in the actor's processes")


# Algorithm


def _advantages(draft: Draft) -> None:
    """`reward_norm`, or `adv_norm` where there is no other: without a critic, one normalisation is all."""
    rewards, own = "actor.reward_norm.", "actor.adv_norm."
    section, other = (rewards, own) if draft.keys(rewards + "*_level") else (own, rewards)
    n_samples = draft.read("gconfig.n_samples", positive)
    for name, target in (("mean_level", MEAN), ("std_level", STD)):
        level = draft.get(section + name)
        draft.recipe.setdefault(target, level if level in ("group", "batch") else "none")
        draft.mapped(section + name, target, draft.recipe[target], "" if section == rewards else "of rewards")
    for key in draft.keys(other + "*"):
        draft.unsupported(key, f"rewards are normalised once, as {section}* says")
    if draft.get(section + "eps") is not None:
        draft.mapped(section + "eps", "actor.reward_norm.eps", draft.read(section + "eps", number))
    for key in (section + "group_size", "actor.group_size"):
        if draft.get(key) == n_samples:
            draft.implied(key, "a group is the gconfig.n_samples responses of a prompt")
        draft.unsupported(key, f"a group is the gconfig.n_samples={n_samples} responses of a prompt")
    _leave_one_out(draft, section + "mean_leave1out", n_samples)
    if draft.get(section + "std_unbiased", True) is True:
        draft.implied(section + "std_unbiased", "divided by n - 1")
    draft.unsupported(section + "std_unbiased", "the standard deviation is divided by n - 1")


def _leave_one_out(draft: Draft, key: str, n_samples: Any) -> None:
    """r - mean of the others = n / (n - 1) * (r - mean of all), which a standard deviation would divide out again."""
    exact = draft.recipe[MEAN] == "group" and draft.recipe[STD] == "none" and n_samples > 1
    if draft.get(key) is True and exact and not draft.writes("actor.reward_scaling"):
        draft.mapped(key, "actor.reward_scaling", n_samples / (n_samples - 1), "n / (n - 1)")
    elif draft.get(key) is True:
        draft.unsupported(key, "the mean is that of all; only without a standard deviation is that the same, scaled")
    draft.implied(key, "switched off")


def _kl(draft: Draft) -> None:
    """The KL term is a penalty on each token's reward, and needs a reference to be configured."""
    weight = draft.read("actor.kl_ctl", number, 0.1)
    has_reference = bool(draft.keys("ref.*"))
    if weight > 0 and has_reference:
        draft.recipe["actor.kl_in"] = "reward"
        draft.recipe["actor.kl_ctl"] = weight
        draft.mapped("actor.kl_ctl", "actor.kl_ctl", weight, "actor.kl_in=reward")
        draft.recipe["actor.kl_estimator"] = draft.get("actor.kl_estimator", "k1")
        if draft.get("ref.path") == draft.get("actor.path"):
            draft.implied("ref.path", "the actor's initial weights")
        return
    if weight > 0:
        draft.implied("actor.kl_ctl", "no reference is configured")
    draft.implied("actor.kl_estimator", "there is no KL term")
    for key in draft.keys("ref.*"):
        draft.implied(key, NO_REFERENCE)


def _unused(draft: Draft, trainers: set[str]) -> None:
    """Options of the engines that the source does not train with."""
    for name in sorted(set(TRAINERS) - trainers):
        for key in draft.keys(f"actor.{name}.*"):
            draft.implied(key, f"only {name} reads it, and the source trains with {' and '.join(sorted(trainers))}")


def _recompute(draft: Draft, trainers: set[str]) -> None:
    """Gradient checkpointing, whose granularity for Megatron-Core is `full` unless written."""
    switch, key = "actor.gradient_checkpointing", "actor.megatron.recompute_granularity"
    is_on = draft.read(switch, flag, False)
    if "megatron" in trainers:
        granularity = draft.get(key, "full") if is_on else "none"
        written = key if draft.writes(key) and is_on else switch
        draft.mapped(written, "actor.megatron.recompute", granularity)
        draft.implied(switch, f"follows from {key}")
        for name in draft.keys("actor.megatron.recompute_*"):
            if not is_on:
                draft.implied(name, f"{switch} is off")
    megatron.checkpoint_layers(draft, switch, is_on)
    for section in ("critic", "ref"):
        for unused in draft.keys(f"{section}.gradient_checkpointing"):
            draft.implied(unused, "only training recomputes")


def _decoupled(draft: Draft) -> None:
    """The decoupled objective, and what only it reads."""
    key, recompute = "actor.use_decoupled_loss", "actor.recompute_logprob"
    if draft.get(key, False) is True:
        if draft.get(recompute) is not True:
            draft.implied(recompute, f"{key} computes them, whatever this says")
    else:
        for name in ("actor.behav_imp_weight_cap", "actor.behave_imp_weight_*", "actor.prox_logp_method"):
            for unused in draft.keys(name):
                draft.implied(unused, f"{key} is off")


# What is said in more than one place


def _repeated(draft: Draft) -> None:
    """Sections repeat the run's name and folder; those of the data and the sampling come back elsewhere."""
    for name in ("experiment_name", "trial_name", "fileroot", "tokenizer_path"):
        for key in draft.keys(f"*.{name}"):
            if key != "cluster.fileroot":
                draft.implied(key, "one name, folder and tokenizer for all sections")
    same = {
        "actor.temperature": "gconfig.temperature",
        "actor.max_new_tokens": "gconfig.max_new_tokens",
        "rollout.consumer_batch_size": "train_dataset.batch_size",
        "tokenizer_path": "actor.path",
        "ref.dtype": "actor.dtype",
        "ref.temperature": "gconfig.temperature",
    }
    for key, other in same.items():
        if draft.get(key) is not None and draft.get(key) == draft.get(other):
            draft.implied(key, f"as {other}")


def _engines(draft: Draft) -> None:
    """Options of the engine that does not generate have no effect."""
    backends = f"{draft.recipe.get('allocation_mode', '')} {draft.recipe.get('rollout.backend', '')}"
    for engine in ("sglang", "vllm"):
        if engine not in backends:
            for key in draft.keys(f"{engine}.*"):
                draft.implied(key, f"the rollout does not run {engine}")


def _evaluation(draft: Draft) -> None:
    own, train = "eval_gconfig.", "gconfig."
    for name, convert in (("n_samples", whole), ("greedy", flag), ("temperature", number)):
        if draft.writes(own + name):
            draft.mapped(own + name, f"evaluator.{name}", draft.read(own + name, convert))
    for key in draft.keys(own + "*"):
        name = key.removeprefix(own)
        if draft.get(key) == draft.get(train + name):
            draft.implied(key, "as in training")
        draft.unsupported(key, f"evaluation takes {name} from gconfig")
    if draft.keys(own + "*") and "evaluator.greedy" not in draft.recipe:
        draft.recipe["evaluator.greedy"] = False
    if draft.writes("valid_dataset.path") and not draft.writes("valid_dataset.split"):
        draft.recipe["valid_dataset.split"] = "test"


DIALECT = Dialect("AReaL", convert, DEFAULTS)
