"""ROLL's pipelines that train on given answers: fine-tuning (section `sft_train`) and DPO (`actor_train`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fivefold_import import reasons
from fivefold_import.checkpoints import note_kept
from fivefold_import.defaults import none
from fivefold_import.dialect import Conversion
from fivefold_import.draft import Draft, Rule
from fivefold_import.roll.defaults import OPTIMIZER
from fivefold_import.roll.layout import NO_CHECKPOINTING, lay_out, router
from fivefold_import.roll.rules import (
    CONFIG,
    MODEL_AS_ACTOR,
    REF,
    TOP,
    TRAIN,
    VALIDATION_DATA,
    WORKER,
    rules_of_trainer,
)
from fivefold_import.rules import implied, off, to, under, unsupported
from fivefold_import.settings import ask_as_user, token_budget, warmup
from fivefold_import.values import DTYPE, flag, number, positive, text, whole

SFT_TRAIN = "sft_train."
PER_DEVICE, ACCUMULATION = "training_args.per_device_train_batch_size", "training_args.gradient_accumulation_steps"
WARMUP, EPOCHS = "training_args.warmup_steps", "training_args.num_train_epochs"
BATCH_SIZE, MAX_LENGTH = "train_dataset.batch_size", "train_dataset.max_length"
INSTRUCTION = "instruction"
"""The column of the prompt in ROLL's rows of preferences."""


def _steps(draft: Draft, source: str) -> None:
    """Convert the number of steps; 0 and negative numbers leave the length to the epochs."""
    if whole(draft.get(source)) > 0:
        draft.mapped(source, "total_train_steps", whole(draft.get(source)))
    draft.implied(source, "the epochs say how long training is")


def _ipo(draft: Draft, source: str) -> None:
    if flag(draft.get(source)):
        draft.mapped(source, "actor.loss_type", "ipo")
    draft.implied(source, "the loss is DPO's")


def _rules(section: str) -> dict[str, Rule]:
    """Return the rules that both pipelines have; `section` is that of the model that is trained."""
    return {
        **TOP,
        **rules_of_trainer(section),
        **under("validation.data_args.", VALIDATION_DATA),
        "max_steps": _steps,
        "sequence_length": to(MAX_LENGTH, whole, "longer examples are dropped"),
        section + EPOCHS: to("total_train_epochs", whole),
        **{f"{section}data_args.{name}": implied("not read") for name in ("messages", "prompt", "response")},
        section + CONFIG + "save_only_model": off(reasons.WHOLE_CHECKPOINTS),
        "track_name": implied("track_with names the tracker"),
    }


FINE_TUNING_RULES: Mapping[str, Rule] = {
    **_rules(SFT_TRAIN),
    "prompt_key": to("train_dataset.prompt_key", text),
    "response_key": to("train_dataset.response_key", text),
    **dict.fromkeys(("query_key", "system_key"), off("a prompt is one column: prepare the file, with chat messages")),
}
DPO_RULES: Mapping[str, Rule] = {
    **_rules(TRAIN),
    **under(REF, {**WORKER, "model_args.*": implied("the reference has the actor's kind of model")}),
    **under(REF + "model_args.", MODEL_AS_ACTOR),
    REF + "model_args.model_name_or_path": to("ref.path", text),
    REF + "model_args.dtype": to("ref.dtype", DTYPE),
    REF + CONFIG + "*": implied("the reference runs with the actor's options"),
    "chosen_key": to("train_dataset.chosen_key", text),
    "rejected_key": to("train_dataset.rejected_key", text),
    "beta": to("actor.beta", number),
    "ipo": _ipo,
    "label_smoothing": to("actor.label_smoothing", number),
    "train_batch_size": implied("an update takes what the replicas accumulate"),
    "disable_reference": off("answers are compared with those of a reference"),
    "reference.*": unsupported("the reference has no such option"),
}


def _defaults(section: str) -> dict[str, Any]:
    return {
        "seed": 42,
        "num_gpus_per_node": 8,
        "rpc_timeout": 3600,
        "max_grad_norm": 1.0,
        "save_steps": 50,
        **none("exp_name", "pretrain", "num_nodes", "output_dir", "sequence_length"),
        section + NO_CHECKPOINTING: False,
        section + "model_args.dtype": "bf16",
        section + PER_DEVICE: 8,
        section + ACCUMULATION: 1,
        **under(section + "training_args.", OPTIMIZER),
    }


FINE_TUNING_DEFAULTS: Mapping[str, Any] = {
    **_defaults(SFT_TRAIN),
    "prompt_key": INSTRUCTION,
    "response_key": "output",
    SFT_TRAIN + EPOCHS: 1,
}
DPO_DEFAULTS: Mapping[str, Any] = {
    **_defaults(TRAIN),
    "max_steps": 500,
    "beta": 0.1,
    "label_smoothing": 0.0,
    "chosen_key": "chosen",
    "rejected_key": "rejected",
    **none(TRAIN + EPOCHS, REF + "model_args.dtype", REF + "model_args.model_name_or_path"),
}


def _converting(section: str, rules: Mapping[str, Rule], n_answers: int) -> Callable[[Draft], None]:
    """Return what converts a pipeline; `n_answers` is the number of sequences of one row."""

    def convert(draft: Draft) -> None:
        lay_out(draft, section)
        router(draft, section)
        _micro_batches(draft, section, n_answers)
        draft.awaiting |= {section + ACCUMULATION, section + WARMUP}
        ask_as_user(draft, "ROLL")
        if n_answers > 1:
            draft.recipe["train_dataset.prompt_key"] = INSTRUCTION
            draft.notes.append(f"train_dataset.prompt_key={INSTRUCTION}, the column of the prompt in ROLL's rows")
        else:
            draft.recipe["train_dataset.shuffle"] = False
            draft.notes.append("train_dataset.shuffle=false: ROLL takes the rows in their order")
        if draft.get(REF + "model_args.dtype") == draft.get(section + "model_args.dtype"):
            draft.implied(REF + "model_args.dtype", "the actor's value holds")
        draft.apply(rules)
        note_kept(draft, "ROLL")

    return convert


def _micro_batches(draft: Draft, section: str, n_answers: int) -> None:
    """Convert the rows of a micro-batch to a number of tokens."""
    length, key = draft.get("sequence_length"), section + PER_DEVICE
    token_budget(draft, key, n_answers * draft.read(key, whole), length if isinstance(length, int) else None)


def _counting(section: str) -> Callable[[Draft], None]:
    """Return what converts the rows of a step: those that all replicas accumulate. Their number needs the layout."""

    def count(draft: Draft) -> None:
        accumulation, plan = section + ACCUMULATION, draft.plans.get("actor")
        if draft.writes(section + WARMUP):
            warmup(draft, section + WARMUP, None)
        draft.implied(section + WARMUP, "nothing is warmed up by a number of steps")
        if plan is None or plan.n_devices is None:
            draft.unsupported(accumulation, f"the rows of a step cannot be counted here: set {BATCH_SIZE}")
            return
        replicas = plan.n_devices // (plan.get("tp") * plan.get("pp") * plan.get("cp"))
        per_device, steps = draft.read(section + PER_DEVICE, positive), draft.read(accumulation, positive)
        draft.recipe[BATCH_SIZE] = per_device * steps * replicas
        draft.mapped(accumulation, BATCH_SIZE, draft.recipe[BATCH_SIZE], f"{per_device}*{steps}*{replicas} replicas")

    return count


FINE_TUNING = Conversion(
    _converting(SFT_TRAIN, FINE_TUNING_RULES, n_answers=1), FINE_TUNING_DEFAULTS, _counting(SFT_TRAIN)
)
DPO = Conversion(_converting(TRAIN, DPO_RULES, n_answers=2), DPO_DEFAULTS, _counting(TRAIN))
