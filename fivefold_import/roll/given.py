"""ROLL's pipelines that train on given answers: fine-tuning (section `sft_train`) and DPO (`actor_train`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fivefold_import.checkpoints import note_kept
from fivefold_import.dialect import Conversion
from fivefold_import.draft import Draft
from fivefold_import.roll.adapters import convert_adapters
from fivefold_import.roll.layout import lay_out, router
from fivefold_import.roll.rules import REF, TABLES, TOP, TRAIN
from fivefold_import.settings import ask_as_user, token_budget, warmup
from fivefold_import.tables import Table
from fivefold_import.values import positive, whole

SFT_TRAIN = "sft_train."
PER_DEVICE, ACCUMULATION = "training_args.per_device_train_batch_size", "training_args.gradient_accumulation_steps"
WARMUP, EPOCHS = "training_args.warmup_steps", "training_args.num_train_epochs"
BATCH_SIZE = "train_dataset.batch_size"
INSTRUCTION = "instruction"
"""The column of the prompt in ROLL's rows of preferences."""


def _table(section: str, own: Table) -> Table:
    """Return the table of a pipeline, with its `own` keys; `section` has the model that is trained."""
    trained = (TABLES["trainer"] | TABLES["given_trainer"]).under(section)
    return TOP.bare() | TABLES["run"] | trained | TABLES["given"] | own


def _converting(section: str, table: Table, n_answers: int) -> Callable[[Draft], None]:
    """Return what converts a pipeline; `n_answers` is the number of sequences of one row."""

    def convert(draft: Draft) -> None:
        lay_out(draft, section)
        router(draft, section)
        convert_adapters(draft, section)
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
        draft.apply(table.rules)
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
        draft.sets(accumulation, BATCH_SIZE, per_device * steps * replicas, f"{per_device}*{steps}*{replicas} replicas")

    return count


def _conversion(section: str, own: Table, n_answers: int, **defaults: Any) -> Conversion:
    table = _table(section, own)
    return Conversion(_converting(section, table, n_answers), table.defaults | defaults, _counting(section))


FINE_TUNING = _conversion(SFT_TRAIN, TABLES["fine_tuning"], n_answers=1, **{SFT_TRAIN + EPOCHS: 1})
DPO = _conversion(TRAIN, TABLES["dpo"], n_answers=2)
