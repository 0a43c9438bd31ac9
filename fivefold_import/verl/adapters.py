"""verl's adapters: PEFT's with FSDP (`model.lora_rank`), Megatron-Bridge's with Megatron-Core (`model.lora.rank`)."""

from __future__ import annotations

from fivefold_import import adapters, reasons
from fivefold_import.critic import ForCritic, has_critic
from fivefold_import.draft import Draft
from fivefold_import.models import is_moe
from fivefold_import.rules import SWITCHED_OFF, is_among

BRIDGE = "lora."
PEFT = ("lora_rank", "lora_alpha", "target_modules", "exclude_modules", "lora_adapter_path")
LAYERS, WITHOUT = "target_modules", "exclude_modules"


def convert_adapters(draft: Draft, section: str, path: str, critic: str = "") -> None:
    """Convert the adapters of the actor and of a critic.

    Args:
        draft: receives the recipe's values and the entries.
        section: what precedes the keys of the actor's model.
        path: the key of the actor's model.
        critic: what precedes the keys of a critic's model; empty if there is none.
    """
    model = str(draft.get(path, ""))
    _convert(draft, section, model)
    if critic and has_critic(draft):
        _convert(ForCritic(draft), critic, str(draft.get(f"{critic}path", model)))


def _convert(draft: Draft, section: str, model: str) -> None:
    """Convert the adapters of one model; the keys of the kind that its engine does not train are implied."""
    if draft.plans["actor"].shards_weights:
        reason = f"the source trains with FSDP, whose adapters have the rank {section}lora_rank"
        draft.all_implied(f"{section}{BRIDGE}*", reason)
        if _has_rank(draft, f"{section}lora_rank"):
            draft.assume({f"{section}lora_alpha": 16})
            adapters.convert_adapters(draft, section, "lora_rank", model, targets=LAYERS, excluded=WITHOUT)
    else:
        for name in PEFT:
            draft.implied(section + name, f"the source trains with Megatron-Core, whose keys are {section}{BRIDGE}*")
        _convert_bridge(draft, section + BRIDGE, model)


def _convert_bridge(draft: Draft, section: str, model: str) -> None:
    """Convert Megatron-Bridge's adapters."""
    if not _has_rank(draft, f"{section}rank"):
        return
    draft.assume({f"{section}alpha": 32})
    shares = draft.get(f"{section}share_expert_adapters", True) is True
    is_split = shares or draft.get(f"{section}normalize_moe_lora") is True
    if shares and is_moe(model):
        draft.notes.append(reasons.experts_apart(draft.target("actor.lora").partition(".")[0]))
    adapters.convert_adapters(draft, section, "rank", model, targets=LAYERS, excluded=WITHOUT, whole_rank=not is_split)


def _has_rank(draft: Draft, key: str) -> bool:
    return not is_among(draft.get(key, 0), SWITCHED_OFF)


# Rules, for the tables


def _rank_of_experts(draft: Draft, source: str) -> None:
    """Convert whether the rank of experts' adapters is divided by the experts that a token visits."""
    if draft.get(source) is True:
        draft.implied(source, "the rank of experts is divided in this way, as by default")
    elif draft.get(source.replace("normalize_moe_lora", "share_expert_adapters"), True) is True:
        draft.unsupported(source, "experts do not share adapters: the rank of each one's is rank_of_experts")
    draft.implied(source, "rank_of_experts is the whole rank")
