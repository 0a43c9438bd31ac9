"""verl: launch scripts with `python3 -m verl.trainer.main_ppo a.b=c ...`, or the trainer's YAML."""

from __future__ import annotations

from fivefold.importing.checkpoints import note_kept
from fivefold.importing.dialect import Conversion, Dialect
from fivefold.importing.draft import Draft
from fivefold.importing.tasks import EVALUATION, REINFORCEMENT, SFT, Sign
from fivefold.importing.verl import sft
from fivefold.importing.verl.actor_rules import ACTOR
from fivefold.importing.verl.defaults import TREE
from fivefold.importing.verl.rules import RULES
from fivefold.importing.verl.tree import Tree, convert_tree, training_steps, warmup_and_rates

SIGNS = (
    Sign("data.output_path", EVALUATION),
    *(Sign(key, SFT) for key in ("model.partial_pretrain", "model.path", "optim.lr", "engine.strategy")),
    *(Sign(f"data.{name}", SFT) for name in ("prompt_dict_keys", "response_dict_keys", "multiturn.enable")),
)
"""Keys of verl's other trainers, whose sections do not stand below `actor_rollout_ref`."""


def convert(draft: Draft) -> None:
    """Convert verl's keys; Megatron-Core takes the tensor degree for an expert tensor degree that is not written."""
    convert_tree(draft, Tree(etp_follows_tp=True))
    warmup_and_rates(draft, ACTOR + "optim.", training_steps(draft, ""))
    draft.apply(RULES)
    note_kept(draft, "verl")


DIALECT = Dialect("verl", {REINFORCEMENT: Conversion(convert, TREE), SFT: Conversion(sft.convert, sft.DEFAULTS)}, SIGNS)
