"""What a source is for: reinforcement learning, which is imported, or another task, which is refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

SFT = "supervised fine-tuning"
PREFERENCES = "preference optimisation (DPO)"
DISTILLATION = "distillation from a teacher"
REWARD_MODEL = "the training of a reward model"
EVALUATION = "evaluation or generation without training"

INSTEAD: Mapping[str, str] = {
    SFT: "`fivefold sft` does that, but its recipes are not imported yet: write one, with the keys of docs/recipe.md",
    PREFERENCES: "`fivefold dpo` does that, but its recipes are not imported yet: write one (docs/preferences.md)",
    REWARD_MODEL: "`fivefold rm` does that, but its recipes are not imported yet: write one (docs/preferences.md)",
    EVALUATION: "`fivefold eval` and `fivefold generate` do that with a recipe of `fivefold train`",
}
"""What Fivefold has for another task; it has nothing for the tasks that are left out."""

PROGRAMS: Mapping[str, str] = {
    "sft": SFT,
    "dpo": PREFERENCES,
    "distill": DISTILLATION,
    "distillation": DISTILLATION,
    "gkd": DISTILLATION,
    "rw": REWARD_MODEL,
    **dict.fromkeys(("eval", "evaluate", "evaluation", "generate", "generation"), EVALUATION),
}
"""Words in the name of a program, such as `verl.trainer.fsdp_sft_trainer`, that tell its task."""


@dataclass(frozen=True)
class Sign:
    """A key that only sources of another task have, or that tells the task by its value."""

    pattern: str
    task: str
    values: tuple[str, ...] = ()
    """The values that tell the task, in lower case; empty: any value that does not switch the key off."""

    def found(self, values: Mapping[str, Any]) -> str | None:
        """Return the `key=value` that tells the task; None if there is none."""
        for key in [key for key in values if fnmatchcase(key, self.pattern)]:
            value = str(values[key]).lower()
            is_told = value in self.values if self.values else values[key] not in (None, False, "", 0)
            if is_told:
                return f"{key}={values[key]}"
        return None


def refuse_other_tasks(framework: str, signs: Sequence[Sign], values: Mapping[str, Any], program: str) -> None:
    """Refuse a source that is not for reinforcement learning.

    Args:
        framework: the framework's name.
        signs: the framework's signs of other tasks.
        values: the source's keys.
        program: the program that a script starts; empty if there is none.

    Raises:
        ValueError: the source is for another task; the message names what tells that.
    """
    name = re.split(r"[./]", program.removesuffix(".py"))[-1].lower()
    found = [(f"the program {program}", PROGRAMS[word]) for word in re.findall("[a-z]+", name) if word in PROGRAMS]
    found += [(text, sign.task) for sign in signs if (text := sign.found(values)) is not None]
    if not found:
        return
    what, task = found[0]
    instead = INSTEAD.get(task, "Fivefold does not do that")
    raise ValueError(
        f"this is a source for {task}: {what}. `fivefold import --from {framework}` takes reinforcement learning, in "
        f"which responses to prompts get rewards (GRPO and its relatives); {instead}"
    )
