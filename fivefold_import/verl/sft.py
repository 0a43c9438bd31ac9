"""verl's supervised fine-tuning: `verl.trainer.fsdp_sft_trainer`, and the later `verl.trainer.sft_trainer`.

Their sections (`model`, `optim`, `engine`) stand at the top level, and have the keys of the actor's. The later trainer
chooses its engine, and has conversations alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from fivefold_import import megatron, reasons
from fivefold_import.checkpoints import note_kept
from fivefold_import.draft import Draft, RolePlan
from fivefold_import.settings import TOKEN_BUDGET_KEY, token_budget
from fivefold_import.values import flag, whole
from fivefold_import.verl.adapters import convert_adapters
from fivefold_import.verl.rules import TABLES
from fivefold_import.verl.tree import training_steps, warmup_and_rates

OVERRIDE = "engine.override_transformer_config."
EACH_EPOCH = "after_each_epoch"
MULTI_TURN = "data.multiturn."
BATCH, BUDGET = "data.micro_batch_size_per_gpu", "data.max_token_len_per_gpu"
SIZES: Mapping[str, tuple[str, ...]] = {
    "cluster.n_nodes": ("--nnodes", "trainer.nnodes"),
    "cluster.n_gpus_per_node": ("--nproc_per_node", "--nproc-per-node", "trainer.n_gpus_per_node"),
}
"""Keys of the recipe, each with the source's; the first one that is written counts."""

RULES = (
    TABLES["actor"].below("fsdp_config.").under("model.fsdp_config.", "engine.")
    | TABLES["actor"].below("megatron.").under("engine.")
    | TABLES["sft"]
)
DEFAULTS = TABLES["sft_defaults"].defaults


def convert(draft: Draft) -> None:
    """Convert the keys that need other keys, then the rest by the rule table."""
    is_new = draft.writes("model.path") or bool(draft.keys("engine*"))
    draft.assume(TABLES["sft_defaults_of_engines" if is_new else "sft_defaults_of_fsdp"].defaults)
    _columns(draft)
    _lay_out(draft)
    _micro_batches(draft)
    convert_adapters(draft, "model.", "model.path" if draft.writes("model.path") else "model.partial_pretrain")
    warmup_and_rates(draft, "optim.", training_steps(draft, ""))
    if draft.writes("optim.warmup_steps_ratio"):
        draft.implied("optim.lr_warmup_steps_ratio", "optim.warmup_steps_ratio is its older name")
    if draft.get("trainer.save_freq") == EACH_EPOCH:
        _save_after_each_epoch(draft)
    draft.apply(RULES.rules)
    note_kept(draft, "verl")


def _save_after_each_epoch(draft: Draft) -> None:
    """Convert the keys of checkpoints that depend on how often they are written."""
    if "hf_model" in str(draft.get("checkpoint.save_contents")):
        draft.recipe["saver.max_to_keep"] = None
        draft.mapped("checkpoint.save_contents", "saver.freq_epochs", 1, "weights are saved with every checkpoint")
    if draft.get("trainer.resume_mode") == "disable":
        draft.implied("trainer.resume_mode", "a run starts from scratch in a free folder, and with --overwrite in any")


def _columns(draft: Draft) -> None:
    """Convert the columns: whole conversations, or a question, which a user asks, and its answer."""
    for section in (MULTI_TURN, "data."):
        key = f"{section}messages_key"
        if draft.get(key) is None or (section == MULTI_TURN and draft.get(MULTI_TURN + "enable") is not True):
            continue
        draft.sets(key, "train_dataset.messages_key", draft.get(key))
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
        draft.sets(first, to_, draft.get(first))
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
