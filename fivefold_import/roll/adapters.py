"""ROLL's adapters: `model_args.lora_target` switches them on."""

from __future__ import annotations

from fivefold_import import adapters
from fivefold_import.critic import ForCritic, has_critic
from fivefold_import.draft import Draft
from fivefold_import.roll.rules import CRITIC, TRAIN

RANK = 8
"""The default of `lora_rank`; `lora_alpha` is twice the rank unless it is written."""


def convert_adapters(draft: Draft, train: str = TRAIN) -> None:
    """Convert the adapters of the actor, whose section is `train`, and of a critic."""
    model = str(draft.get("pretrain", draft.get(f"{train}model_args.model_name_or_path", "")))
    _convert(draft, f"{train}model_args.", model)
    if has_critic(draft):
        own = draft.get(f"{CRITIC}model_args.model_name_or_path", draft.get("reward_pretrain", model))
        _convert(ForCritic(draft), f"{CRITIC}model_args.", str(own))


def _convert(draft: Draft, section: str, model: str) -> None:
    """Convert the adapters of one model."""
    if not draft.get(f"{section}lora_target"):
        return
    draft.assume({f"{section}lora_rank": RANK})
    rank = draft.get(f"{section}lora_rank")
    draft.assume({f"{section}lora_alpha": 2 * rank if isinstance(rank, int) else None})
    adapters.convert_adapters(draft, section, "lora_rank", model, targets="lora_target")
