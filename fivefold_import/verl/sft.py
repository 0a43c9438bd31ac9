"""verl's supervised fine-tuning: `verl.trainer.fsdp_sft_trainer`, and the later `verl.trainer.sft_trainer`.

Their sections (`model`, `optim`, `engine`) stand at the top level, and have the keys of the actor's. The later trainer
chooses its engine, and has conversations alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold_import import megatron, reasons
from fivefold_import.checkpoints import kept, loaded_contents, note_kept, weights_in_checkpoints
from fivefold_import.defaults import none
from fivefold_import.draft import Draft, RolePlan, Rule
from fivefold_import.rules import for_each, implied, moments_on_host, off, only, to, under, unknown, unsupported
from fivefold_import.settings import TOKEN_BUDGET_KEY, token_budget
from fivefold_import.values import LR_SCHEDULE, flag, number, text, whole
from fivefold_import.verl import defaults as verl_defaults
from fivefold_import.verl.actor_rules import ACTOR_RULES, MODEL_RULES, OPTIMIZER
from fivefold_import.verl.rules import DATA_RULES, TRAINER_RULES
from fivefold_import.verl.tree import training_steps, warmup_and_rates

OVERRIDE = "engine.override_transformer_config."
EACH_EPOCH = "after_each_epoch"
MULTI_TURN = "data.multiturn."
BATCH, BUDGET = "data.micro_batch_size_per_gpu", "data.max_token_len_per_gpu"


def _engine_rules() -> dict[str, Rule]:
    """Return the rules of the engine's section, which has what the actor has below `megatron` and `fsdp_config`."""
    parts = ("fsdp_config.", "megatron.")
    return {key.removeprefix(part): rule for part in parts for key, rule in ACTOR_RULES.items() if key.startswith(part)}


def _after(frequency: str, epochs: str) -> Rule:
    """Map a number of steps, or the word for the end of each epoch, to one of two keys of the recipe."""

    def rule(draft: Draft, source: str) -> None:
        if draft.get(source) == EACH_EPOCH:
            draft.mapped(source, epochs, 1)
        elif whole(draft.get(source)) > 0:
            draft.mapped(source, frequency, whole(draft.get(source)))
        draft.implied(source, "it is switched off")

    return rule


DATA: Mapping[str, Rule] = {
    **DATA_RULES,
    "max_length": to("train_dataset.max_length", whole, "longer examples are dropped"),
    "response_key": to("train_dataset.response_key", text),
    **dict.fromkeys(("prompt_dict_keys", "response_dict_keys"), off(reasons.NO_NESTED_COLUMNS)),
    "multiturn.enable": implied("messages_key names the conversations"),
    "multiturn.messages_key": implied("multiturn.enable is off"),
    "*tools_key": implied("a conversation is rendered without tools"),
    "*enable_thinking_key": implied(reasons.TEMPLATE),
    "ignore_input_ids_mismatch": implied(reasons.TEMPLATE),
    "micro_batch_size": unsupported("a micro-batch over all devices has no fixed size; set actor.mb_spec"),
    "max_prompt_length": implied("max_length is the limit of an example"),
    "max_response_length": implied("max_length is the limit of an example"),
    "balance_dp_token": implied(reasons.BALANCED),
    "pad_mode": implied(reasons.ALWAYS_PACKED),
    "chat_template": off(reasons.TEMPLATE),
    "truncation": only("error", holds=reasons.TOO_LONG, otherwise="examples that are too long are dropped, not cut"),
}

RULES: Mapping[str, Rule] = {
    **under("data.", DATA),
    **under("model.", MODEL_RULES),
    "model.partial_pretrain": to("actor.path", text),
    "model.strategy": implied("it is FSDP either way"),
    "model.hf_config_path": off("the model's folder has its config.json"),
    "model.custom_chat_template": off(reasons.TEMPLATE),
    "model.fsdp_config.offload_params": moments_on_host,
    "model.fsdp_config.cpu_offload": implied("offload_params says what is in host memory"),
    **{f"model.{key}": rule for key, rule in ACTOR_RULES.items() if key.startswith("fsdp_config.")},
    **under("optim.", OPTIMIZER),
    "optim.warmup_steps_ratio": to("actor.optimizer.warmup_steps_proportion", number),
    "optim.lr_scheduler": to("actor.optimizer.lr_scheduler_type", LR_SCHEDULE),
    "optim": implied("it names the optimizer of the engine"),
    **under("engine.", _engine_rules()),
    **under(OVERRIDE, megatron.TRANSFORMER),
    "engine.forward_only": off("the engine trains"),
    "engine.*": unknown("the engine"),
    **for_each(("engine.", "optim.", "model.", "checkpoint."), {"_target_": implied("it names a class of verl's")}),
    "use_remove_padding": implied(reasons.ALWAYS_PACKED),
    "checkpoint.save_contents": weights_in_checkpoints("trainer.save_freq", "trainer.max_ckpt_to_keep"),
    "checkpoint.load_contents": loaded_contents("checkpoint.save_contents"),
    "checkpoint.mbridge_config.*": implied(reasons.OWN_BRIDGE),
    "checkpoint.*": unknown("checkpoints"),
    **under("trainer.", TRAINER_RULES),
    "trainer.save_freq": _after("recover.freq_steps", "recover.freq_epochs"),
    "trainer.test_freq": _after("evaluator.freq_steps", "evaluator.freq_epochs"),
    "trainer.max_ckpt_to_keep": kept,
    "trainer.resume_path": off(reasons.OTHER_CHECKPOINTS),
    **dict.fromkeys(("profiler*", "global_profiler*"), off(reasons.RECORDED)),
    "hydra.*": implied(reasons.LAUNCHER),
    "--*": implied(reasons.LAUNCHER),
}

SIZES: Mapping[str, tuple[str, ...]] = {
    "cluster.n_nodes": ("--nnodes", "trainer.nnodes"),
    "cluster.n_gpus_per_node": ("--nproc_per_node", "--nproc-per-node", "trainer.n_gpus_per_node"),
}
"""Keys of the recipe, each with the source's, of which the first that is written counts."""

OLD: Mapping[str, Any] = {
    "data.prompt_key": "question",
    "data.response_key": "answer",
    "optim.lr": 1e-5,
    "optim.betas": [0.9, 0.95],
    "optim.weight_decay": 0.01,
    "optim.clip_grad": 1.0,
    "optim.lr_scheduler": "cosine",
    "optim.lr_warmup_steps_ratio": 0.1,
    BATCH: 4,
    "trainer.n_gpus_per_node": 8,
}
"""Defaults of the trainer with FSDP alone."""
NEW: Mapping[str, Any] = {
    **under("optim.", verl_defaults.OPTIMIZER),
    "optim.lr": 1e-3,
    "data.messages_key": "messages",
    "data.use_dynamic_bsz": True,
    BUDGET: 8192,
    "model.enable_gradient_checkpointing": True,
    "trainer.n_gpus_per_node": 1,
}
"""Defaults of the trainer that chooses its engine."""
DEFAULTS: Mapping[str, Any] = {
    "data.train_batch_size": 256,
    "data.max_length": 1024,
    "trainer.total_epochs": 4,
    "trainer.project_name": "gsm8k-sft",
    "trainer.experiment_name": "test",
    "trainer.seed": 1,
    "trainer.nnodes": 1,
    **none("trainer.total_training_steps", "trainer.default_local_dir"),
}


def convert(draft: Draft) -> None:
    """Convert the keys that need other keys, then the rest by the rule table."""
    is_new = draft.writes("model.path") or bool(draft.keys("engine*"))
    draft.assume(NEW if is_new else OLD)
    _columns(draft)
    _lay_out(draft)
    _micro_batches(draft)
    warmup_and_rates(draft, "optim.", training_steps(draft, ""))
    if draft.writes("optim.warmup_steps_ratio"):
        draft.implied("optim.lr_warmup_steps_ratio", "optim.warmup_steps_ratio is its older name")
    if draft.get("trainer.save_freq") == EACH_EPOCH:
        _save_after_each_epoch(draft)
    draft.apply(RULES)
    note_kept(draft, "verl")


def _save_after_each_epoch(draft: Draft) -> None:
    """Convert the keys of checkpoints that depend on how often they are written."""
    if "hf_model" in str(draft.get("checkpoint.save_contents")):
        draft.recipe["saver.max_to_keep"] = None
        draft.mapped("checkpoint.save_contents", "saver.freq_epochs", 1, "weights are saved with every checkpoint")
    if draft.get("trainer.resume_mode") == "disable":
        draft.implied("trainer.resume_mode", "a run starts anew in a free folder, and with --overwrite in any")


def _columns(draft: Draft) -> None:
    """Convert the columns: those of whole conversations, or those of a question, which a user asks, and its answer."""
    for section in (MULTI_TURN, "data."):
        key = f"{section}messages_key"
        if draft.get(key) is None or (section == MULTI_TURN and draft.get(MULTI_TURN + "enable") is not True):
            continue
        draft.recipe["train_dataset.messages_key"] = draft.get(key)
        draft.mapped(key, "train_dataset.messages_key", draft.get(key))
        for unused in ("data.prompt_key", "data.response_key"):
            draft.implied(unused, f"{key} names whole conversations")
        return
    draft.recipe["train_dataset.apply_chat_template"] = True
    draft.notes.append("train_dataset.apply_chat_template=true: verl asks each question as a user's message")


def _lay_out(draft: Draft) -> None:
    """Read the engine, its degrees and devices, and what it recomputes."""
    plan = draft.plans["actor"] = RolePlan("fsdp", n_devices=_devices(draft), etp_follows_tp=True)
    for key in ("engine.strategy", "engine"):
        if draft.writes(key) and "megatron" in str(draft.get(key)):
            plan.backend = "megatron"
        if str(draft.get(key)) in ("megatron", "fsdp", "fsdp2"):
            plan.keys |= {key: ""} if draft.writes(key) else {}
        else:
            draft.unsupported(key, f"{draft.get(key)!r} is not offered; {plan.backend} is laid out in its place")
    switch = "model.enable_gradient_checkpointing"
    is_on = draft.read(switch, flag, False)
    if plan.shards_weights:
        megatron.checkpoint_layers(draft, switch, is_on=is_on)
        for key in ("ulysses_sequence_parallel_size", "engine.ulysses_sequence_parallel_size"):
            if draft.writes(key):
                draft.lay_out(key, "actor", "cp")
        return
    megatron.degrees(draft, "actor", "engine.")
    megatron.recompute(draft, OVERRIDE, switch, is_on=True)
    megatron.router_defaults(draft, OVERRIDE, str(draft.get("model.path", "")), {})


def _devices(draft: Draft) -> int | None:
    """Convert the numbers of nodes and GPUs: those that `torchrun` starts processes for, else the trainer's keys."""
    n_devices = 1
    for to_, keys in SIZES.items():
        found = [key for key in keys if isinstance(draft.get(key), int)]
        if not found:
            return None
        first, *others = found
        draft.recipe[to_] = draft.get(first)
        draft.mapped(first, to_, draft.get(first))
        for key in others:
            draft.implied(key, f"{first} is the number of processes")
        n_devices *= draft.get(first)
    return n_devices


def _micro_batches(draft: Draft) -> None:
    """Convert the size of a micro-batch: a token budget of a context shard, or a number of examples."""
    dynamic, shards = "data.use_dynamic_bsz", draft.plans["actor"].get("cp")
    if draft.get(dynamic) is True and draft.get(BUDGET) is not None:
        note = f"times {shards} context parallel shards" if shards > 1 else ""
        draft.mapped(BUDGET, TOKEN_BUDGET_KEY, draft.read(BUDGET, whole) * shards, note)
        draft.implied(BATCH, f"{dynamic} is on, so {BUDGET} counts")
    elif draft.get(BATCH) is not None:
        length = draft.get("data.max_length")
        token_budget(draft, BATCH, draft.get(BATCH), length if isinstance(length, int) else None)
        draft.implied(BUDGET, f"{dynamic} is off, so {BATCH} counts")
    draft.implied(dynamic, reasons.TOKEN_BUDGET)
