"""siiRL: launch scripts whose array holds `python3 -m siirl... a.b=c`; verl's key tree with some keys of its own."""

from __future__ import annotations

from fivefold_import.checkpoints import note_kept
from fivefold_import.dialect import Conversion, Dialect
from fivefold_import.draft import Draft
from fivefold_import.siirl.defaults import DECAY, TREE, WARMUP_STYLE
from fivefold_import.siirl.rules import RULES
from fivefold_import.tasks import REINFORCEMENT
from fivefold_import.verl import tree as verl_tree
from fivefold_import.verl.actor_rules import ACTOR
from fivefold_import.verl.dialect import SIGNS


def convert(draft: Draft) -> None:
    """Convert siiRL's keys; an expert tensor degree that is not written is 1 there."""
    verl_tree.convert_tree(draft, verl_tree.Tree(etp_follows_tp=False))
    verl_tree.warmup_and_rates(draft, ACTOR + "optim.", verl_tree.training_steps(draft, ""))
    if draft.plans["actor"].shards_weights:
        draft.implied(DECAY, f"with FSDP, siiRL reads {WARMUP_STYLE} in its place")
    else:
        draft.implied(WARMUP_STYLE, f"with Megatron, siiRL reads {DECAY} in its place")
    draft.apply(RULES)
    note_kept(draft, "siiRL", "100")


DIALECT = Dialect("siiRL", {REINFORCEMENT: Conversion(convert, TREE)}, SIGNS)
