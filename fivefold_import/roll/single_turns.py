"""ROLL's environments with one answer to a question of a data set: plain prompts with a reward here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fivefold_import.draft import Draft
from fivefold_import.roll.games import ENVS, HELD_OUT_ENVS, TRAIN_ENVS, sampling
from fivefold_import.values import positive, text

OBSERVATION = "{observation}"
ANSWERED = "an answer ends the episode"


@dataclass(frozen=True)
class Question:
    """What an environment asks and how it judges."""

    reward: str
    question: str
    """Column of the question, unless the source names one."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the reward."""
    around: str = ""
    """What stands around a question, in the place of words that ROLL's code has."""


KINDS: Mapping[str, Question] = {
    "roll_math": Question("math", "problem"),
    "roll_qa": Question(
        "exact_match",
        "question",
        {"pattern": "(?s)<answer>(.*?)</answer>", "plain_words": True},
        "Think first, between <think> and </think>. Then answer between <answer> and </answer>.\n\n{prompt}",
    ),
}


def asks_once(draft: Draft) -> bool:
    """Return whether one environment of `KINDS` is trained on and evaluated, without tools, in chats of one form."""
    tags = {str(tag) for section in (TRAIN_ENVS, HELD_OUT_ENVS) for tag in draft.get(f"{section}tags") or ()}
    if len(tags) != 1:
        return False
    own = f"{ENVS}{tags.pop()}."
    shown = re.findall(r"\{(\w+)\}", str(draft.get(f"{own}agent_template")).replace("{{", ""))
    return (
        draft.get(f"{own}env_type") in KINDS
        and shown == [OBSERVATION.strip("{}")]
        and str(draft.get(f"{own}env_manager_cls", "")).endswith(".TrajEnvManager")
        and not draft.keys(f"{own}tool_wrapper.*")
    )


def convert_questions(draft: Draft) -> None:
    """Convert the data set, its questions and its reward."""
    own = f"{ENVS}{draft.get(f'{TRAIN_ENVS}tags')[0]}."
    kind, config = KINDS[str(draft.get(f"{own}env_type"))], f"{own}env_config."
    draft.mapped(f"{own}env_type", "reward.fn", kind.reward)
    draft.recipe |= {f"reward.kwargs.{name}": value for name, value in kind.kwargs.items()}
    draft.sets(f"{config}dataset_name", "train_dataset.path", draft.read(f"{config}dataset_name", text))
    draft.sets(f"{config}question_key", "train_dataset.prompt_key", draft.get(f"{config}question_key", kind.question))
    draft.sets(f"{config}answer_key", "train_dataset.answer_key", draft.get(f"{config}answer_key", "answer"))
    if draft.writes(f"{config}split"):
        draft.mapped(f"{config}split", "train_dataset.split", draft.get(f"{config}split"))
    for name in ("mode", "seed", "load_from_cache_file"):
        draft.implied(f"{config}{name}", "rows are drawn by the recipe's seed")
    _chat(draft, own, kind)
    convert_lengths(draft, own)
    _held_out(draft)
    for name in ("max_steps", "env_config.max_steps", "env_manager_cls"):
        draft.implied(f"{own}{name}", ANSWERED)
    sampling(draft)


def _chat(draft: Draft, own: str, kind: Question) -> None:
    template = str(draft.get(f"{own}agent_template")).format(observation=kind.around or "{prompt}")
    draft.recipe["train_dataset.apply_chat_template"] = True
    draft.mapped(f"{own}agent_template", "train_dataset.prompt_template", template)
    draft.mapped(f"{own}agent_system_template", "train_dataset.system_prompt", draft.get(f"{own}agent_system_template"))
    if kind.reward == "math":
        draft.notes.append(
            r"reward.fn=math finds answers outside of \boxed{} too, which ROLL's environment counts as wrong"
        )
    if kind.around:
        draft.notes.append(f"{kind.around.splitlines()[0]!r} stands before a question: the words of ROLL's code differ")


def convert_lengths(draft: Draft, own: str) -> None:
    """Convert the most tokens of an answer, and of a question and its answer together."""
    together, turn = draft.read("sequence_length", positive, 4096), f"{own}max_tokens_per_step"
    answer = min(draft.read(turn, positive, together), together - 1)
    draft.sets(turn, "gconfig.max_new_tokens", answer)
    draft.sets("sequence_length", "gconfig.max_tokens", together)
    draft.recipe["train_dataset.max_length"] = max(1, together - answer)
    for key in ("actor_infer.generating_args.max_new_tokens", "max_tokens_per_step"):
        if draft.get(key, 0) >= answer:
            draft.implied(key, f"{turn} says how long an answer may be")
    draft.implied("max_actions_per_traj", ANSWERED)
    draft.implied("response_length", "sequence_length limits the episode")
    draft.implied("prompt_length", "sequence_length limits the episode")


def _held_out(draft: Draft) -> None:
    """Convert the questions of an evaluation, which are rows of the same data set."""
    if not limits_held_out(draft):
        return
    for name in ("path", "split", "prompt_template"):
        if (value := draft.recipe.get(f"train_dataset.{name}")) is not None:
            draft.recipe[f"valid_dataset.{name}"] = value


def limits_held_out(draft: Draft) -> bool:
    """Return whether there is an evaluation, whose rows are of the same data set; then convert how many they are."""
    if not isinstance(draft.get(f"{HELD_OUT_ENVS}tags"), list):
        return False
    groups = f"{HELD_OUT_ENVS}num_env_groups"
    draft.sets(groups, "valid_dataset.limit", draft.read(groups, positive, 128))
    draft.notes.append("valid_dataset has rows that are trained on too, as ROLL evaluates them")
    return True
