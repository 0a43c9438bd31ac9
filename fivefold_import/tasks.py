"""What a source is for: a task of one of Fivefold's commands, or another one, which is refused by name."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from fivefold.config.schema.preferences import DPORecipe, RMRecipe
from fivefold.config.schema.recipe import Recipe
from fivefold.config.schema.sft import SFTRecipe
from fivefold.config.schema.train import TrainRecipe


@dataclass(frozen=True)
class Task:
    """What a source is for."""

    name: str
    instead: str = "Fivefold does not do that"
    """What to do if a framework's sources for it are not imported."""
    schema: type[Recipe] | None = None
    """The kind of recipe that it becomes; None: no command does it."""


REINFORCEMENT = Task(
    "reinforcement learning, in which responses to prompts get rewards (GRPO and its relatives)", schema=TrainRecipe
)
SFT = Task(
    "supervised fine-tuning",
    "`fivefold sft` does that: write a recipe for it, with the keys of docs/recipe.md",
    SFTRecipe,
)
PREFERENCES = Task(
    "preference optimisation (DPO)",
    "`fivefold dpo` does that: write a recipe for it (docs/preferences.md)",
    DPORecipe,
)
REWARD_MODEL = Task(
    "the training of a reward model",
    "`fivefold rm` does that: write a recipe for it (docs/preferences.md)",
    RMRecipe,
)
DISTILLATION = Task(
    "distillation from a teacher on given answers",
    "`fivefold train` distils on the student's own answers, and with expert_dataset.signal=teacher on given ones too "
    "(docs/distillation.md); `fivefold sft` trains on a teacher's answers without its probabilities",
)
EVALUATION = Task(
    "evaluation or generation without training",
    "`fivefold eval` and `fivefold generate` do that with a recipe of `fivefold train`",
)
SELF_PLAY = Task(
    "self-play fine-tuning (SPIN), which prefers a row's response to the model's own",
    "`fivefold generate` writes the model's responses, and `fivefold dpo` trains on pairs of responses",
)
SELF_PLAY_PREFERENCES = Task(
    "self-play preference optimisation (SPPO), whose loss is a squared distance",
    "`fivefold dpo` trains on pairs of responses (docs/preferences.md)",
)
PRIME = Task(
    "PRIME, whose rewards of tokens come from a model that is trained with the actor",
    "write the reward of whole responses as reward.fn of a recipe of `fivefold train`",
)
FLOWS = Task(
    "FlowRL, whose loss matches a distribution of rewards with a model of its normaliser",
    "write the loss as your own (docs/extending.md), for a recipe of `fivefold train`",
)
PICTURES = Task("models of images, video or actions (diffusion, VLA)", "`fivefold train` has language models alone")

PROGRAMS: Mapping[str, Task] = {
    "sft": SFT,
    "dpo": PREFERENCES,
    "distill": DISTILLATION,
    "distillation": DISTILLATION,
    "gkd": DISTILLATION,
    "rw": REWARD_MODEL,
    "spin": SELF_PLAY,
    "sppo": SELF_PLAY_PREFERENCES,
    "prime": PRIME,
    "flowrl": FLOWS,
    **dict.fromkeys(("diffusion", "flowgrpo", "dance", "vla", "embodied"), PICTURES),
    **dict.fromkeys(("eval", "evaluate", "evaluation", "generate", "generation"), EVALUATION),
}
"""Words in the name of a program, such as `verl.trainer.fsdp_sft_trainer`, or of its recipe, that show its task."""
RECIPES = re.compile(r"\b(?:recipe|experimental)[./](\w+)")
"""The recipe that a program is of, `prime` of `recipe.prime.main_ppo`."""


@dataclass(frozen=True)
class Sign:
    """A key that only sources of another task than reinforcement learning have, or whose value shows the task."""

    pattern: str
    task: Task
    values: tuple[str, ...] = ()
    """The values that show the task, in lower case; empty: any value that does not switch the key off."""

    def found(self, values: Mapping[str, Any]) -> str | None:
        """Return the `key=value` that shows the task; None if there is none."""
        for key in [key for key in values if fnmatchcase(key, self.pattern)]:
            value = str(values[key]).lower()
            is_told = value in self.values if self.values else values[key] not in (None, False, "", 0)
            if is_told:
                return f"{key}={values[key]}"
        return None


def task_of(
    framework: str, offered: Collection[Task], signs: Sequence[Sign], values: Mapping[str, Any], program: str
) -> Task:
    """Return the task of a source; without a sign of another one, it is reinforcement learning.

    Args:
        framework: the framework's name.
        offered: the tasks that are imported from the framework.
        signs: the framework's signs of tasks.
        values: the source's keys.
        program: the program that a script starts; empty if there is none.

    Raises:
        ValueError: the task is not offered; the message names what shows it.
    """
    path = program.removesuffix(".py").lower()
    names = [re.split(r"[./]", path)[-1], *RECIPES.findall(path)]
    words = re.findall("[a-z]+", "_".join(names))
    found = [(f"the program {program}", PROGRAMS[word]) for word in words if word in PROGRAMS]
    found += [(text, sign.task) for sign in signs if (text := sign.found(values)) is not None]
    if not found:
        return REINFORCEMENT
    what, task = found[0]
    if task in offered:
        return task
    raise ValueError(
        f"this is a source for {task.name}: {what}. `fivefold import --from {framework}` takes "
        f"{' and '.join(each.name for each in offered)}; {task.instead}"
    )
