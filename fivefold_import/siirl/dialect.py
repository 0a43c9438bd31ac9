"""siiRL: launch scripts whose array holds `python3 -m siirl... a.b=c`, with verl's key tree and some other keys."""

from __future__ import annotations

from fivefold_import.checkpoints import note_kept
from fivefold_import.dialect import Conversion, Dialect
from fivefold_import.draft import Draft
from fivefold_import.tables import read_tables
from fivefold_import.tasks import REINFORCEMENT
from fivefold_import.verl import rules as verl
from fivefold_import.verl import tree
from fivefold_import.verl.dialect import SIGNS

TABLES = read_tables("siirl", {})
RULES = verl.RULES | TABLES["top"]
DECAY, WARMUP_STYLE = verl.ACTOR + "optim.lr_decay_style", verl.ACTOR + "optim.warmup_style"
"""The keys of the learning rate's schedule: with Megatron and with FSDP."""


def convert(draft: Draft) -> None:
    """Convert siiRL's keys; an expert tensor degree that is not written is 1 there."""
    tree.convert_tree(draft, tree.Tree(etp_follows_tp=False))
    tree.warmup_and_rates(draft, verl.ACTOR + "optim.", tree.training_steps(draft, ""))
    if draft.plans["actor"].shards_weights:
        draft.implied(DECAY, f"with FSDP, siiRL reads {WARMUP_STYLE} in its place")
    else:
        draft.implied(WARMUP_STYLE, f"with Megatron, siiRL reads {DECAY} in its place")
    draft.apply(RULES.rules)
    note_kept(draft, "siiRL", "100")


DIALECT = Dialect(
    "siiRL",
    {REINFORCEMENT: Conversion(convert, RULES.defaults | TABLES["defaults"].defaults)},
    SIGNS,
)
