"""siiRL: launch scripts whose array holds `python3 -m siirl... a.b=c`, with verl's key tree and some other keys."""

from __future__ import annotations

from collections.abc import Sequence

from fivefold_import.checkpoints import note_kept
from fivefold_import.dialect import Conversion, Dialect, merged
from fivefold_import.draft import Draft
from fivefold_import.source import Document
from fivefold_import.tables import read_tables
from fivefold_import.tasks import PICTURES, REINFORCEMENT, Sign
from fivefold_import.verl import rules as verl
from fivefold_import.verl import tree
from fivefold_import.verl.dialect import SIGNS

TABLES = read_tables("siirl", {})
RULES = verl.RULES | TABLES["top"]
DECAY, WARMUP_STYLE = verl.ACTOR + "optim.lr_decay_style", verl.ACTOR + "optim.warmup_style"
"""The keys of the learning rate's schedule: with Megatron and with FSDP."""
KEPT_RATE = (
    "siiRL's workers on Megatron-Core build a schedule of the learning rate, linear by default, and never step it: "
    "their rate stays as it begins. The recipe has a schedule if the source writes one"
)

SWITCH = verl.MODEL + "enable_gradient_checkpointing"
CHECKPOINTED = verl.MODEL + "gradient_checkpointing_kwargs.activations_checkpoint_"
"""What precedes siiRL's own names of Megatron-Core's `recompute_granularity`, `recompute_method` and so on."""


def merge(documents: Sequence[Document]) -> Document:
    """Merge the files; what says how much is recomputed gets verl's names, unless it is switched off."""
    whole = merged(documents)
    if whole.values.get(SWITCH) is False:
        return whole
    return whole.renamed(
        lambda key: (
            f"{verl.ACTOR}{verl.OVERRIDE}recompute_{key.removeprefix(CHECKPOINTED)}"
            if key.startswith(CHECKPOINTED)
            else key
        )
    )


def convert(draft: Draft) -> None:
    """Convert siiRL's keys; an expert tensor degree that is not written is 1 there."""
    tree.convert_tree(draft, tree.Tree(etp_follows_tp=False))
    tree.warmup_and_rates(draft, verl.ACTOR + "optim.", tree.training_steps(draft, ""))
    if draft.plans["actor"].shards_weights:
        draft.implied(DECAY, f"with FSDP, siiRL reads {WARMUP_STYLE} in its place")
    else:
        draft.implied(WARMUP_STYLE, f"with Megatron, siiRL reads {DECAY} in its place")
        draft.notes.append(KEPT_RATE)
    draft.apply(RULES.rules)
    note_kept(draft, "siiRL", "100")


DIALECT = Dialect(
    "siiRL",
    {REINFORCEMENT: Conversion(convert, RULES.defaults | TABLES["defaults"].defaults)},
    (*SIGNS, *(Sign(f"{section}.workflow_type", PICTURES, ("embodied",)) for section in ("algorithm", "dag"))),
    merge,
)
