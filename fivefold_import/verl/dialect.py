"""verl: launch scripts with `python3 -m verl.trainer.main_ppo a.b=c ...`, or the trainer's YAML."""

from __future__ import annotations

from fivefold_import.checkpoints import note_kept
from fivefold_import.dialect import Conversion, Dialect
from fivefold_import.draft import Draft
from fivefold_import.tasks import EVALUATION, REINFORCEMENT, SFT, Sign
from fivefold_import.verl import sft
from fivefold_import.verl.rules import ACTOR, RULES
from fivefold_import.verl.tree import Tree, convert_tree, training_steps, warmup_and_rates

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
    draft.apply(RULES.rules)
    note_kept(draft, "verl")


DIALECT = Dialect(
    "verl", {REINFORCEMENT: Conversion(convert, RULES.defaults), SFT: Conversion(sft.convert, sft.DEFAULTS)}, SIGNS
)
