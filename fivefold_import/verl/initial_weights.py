"""Where actor and reference take their first weights from: the model's folder, or a Megatron-Core checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

from fivefold_import.draft import Draft, Rule
from fivefold_import.rules import implied
from fivefold_import.values import text

SWITCH, PATH = "megatron.use_dist_checkpointing", "megatron.dist_checkpointing_path"
KEY = "actor.megatron."
IS_OFF = "it is switched off: the weights are those of the model's folder"
NO_OTHER_CHECKPOINT = (
    "the reference starts from the actor's weights or from a Hugging Face folder: `fivefold convert` makes one of the "
    "checkpoint, for ref.path"
)


def actor_rules() -> dict[str, Rule]:
    """Return the rules of the actor's keys, which stand below its section."""
    return {
        SWITCH: _switch_of_actor,
        PATH: _path_of_actor,
        "megatron.dist_checkpointing_prefix": implied("what stands before the checkpoint's names is found"),
    }


def reference_rules(actor: str) -> Mapping[str, Rule]:
    """Return the rules of the reference's keys, which stand below its section.

    Args:
        actor: where the actor's keys stand.
    """

    def same_checkpoint(draft: Draft, source: str) -> None:
        section = source.partition("megatron.")[0]
        used, actors = ((bool(draft.get(role + SWITCH)), draft.get(role + PATH)) for role in (section, actor))
        if not used[0]:
            draft.implied(source, IS_OFF)
        elif used == actors:
            draft.implied(source, "the reference starts from the actor's weights")
        else:
            draft.unsupported(source, NO_OTHER_CHECKPOINT)

    return {**actor_rules(), SWITCH: same_checkpoint, PATH: same_checkpoint}


def _switch_of_actor(draft: Draft, source: str) -> None:
    if draft.get(source) is True:
        draft.mapped(source, KEY + "use_dist_checkpointing", True, "a reference without a path starts from it too")
    draft.implied(source, IS_OFF)


def _path_of_actor(draft: Draft, source: str) -> None:
    if draft.get(source.replace(PATH, SWITCH)) is True:
        draft.mapped(source, KEY + "dist_checkpointing_path", text(draft.get(source)))
    draft.implied(source, IS_OFF)
