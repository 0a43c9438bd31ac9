"""ROLL's questions of a data set with one tool in tags, which Fivefold's own game plays."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from fivefold_import.draft import Draft
from fivefold_import.roll.games import HELD_OUT_ENVS, TRAIN_ENVS, sampling
from fivefold_import.roll.gem import only_tag, unescaped
from fivefold_import.roll.single_turns import KINDS, OBSERVATION, limits_held_out
from fivefold_import.values import number, text

GAME, READER = (f"fivefold.environments.games.tagged_tools:{name}" for name in ("TaggedTool", "rows"))
FIRST = "wrapper.tool_configs.0."


@dataclass(frozen=True)
class Tool:
    """A tool, and the environment whose answers are judged as its game judges them."""

    name: str
    env_type: str
    arguments: Mapping[str, str]


TOOLS: Mapping[str, Tool] = {
    "python_code": Tool("code", "roll_math", {"timeout": "timeout_s"}),
    "search": Tool("search", "roll_qa", {"timeout": "timeout_s", "search_url": "search_url", "topk": "n_documents"}),
}
"""Tools by `tool_id`."""
USES: Mapping[str, str] = {
    "max_tool_uses": "max_uses",
    "tool_reward": "tool_reward",
    "tool_success_reward": "success_reward",
}


def uses_tool(draft: Draft) -> bool:
    """Return whether questions are answered with one known tool, in a chat whose turns begin with the observation."""
    own = only_tag(draft)
    tool = TOOLS.get(str(draft.get(f"{own}tool_{FIRST}tool_id")))
    template = str(draft.get(f"{own}agent_template"))
    return (
        tool is not None
        and draft.get(f"{own}env_type") == tool.env_type
        and not draft.keys(f"{own}tool_wrapper.tool_configs.1.*")
        and str(draft.get(f"{own}env_manager_cls")).endswith(".TrajEnvManager")
        and template.startswith(OBSERVATION)
        and len(re.findall(r"\{\w+\}", template.replace("{{", "").replace("}}", ""))) == 1
        and isinstance(draft.get(f"{own}tool_wrapper.wrapper_args.max_tool_uses", 10), int)
    )


def convert_questions_with_tool(draft: Draft) -> None:
    """Convert the data set, its questions, the tool and what its use earns."""
    own = str(only_tag(draft))
    config, wrapper = f"{own}env_config.", f"{own}tool_wrapper."
    kind = KINDS[str(draft.get(f"{own}env_type"))]
    tool = TOOLS[str(draft.get(f"{own}tool_{FIRST}tool_id"))]
    keys = {"tool": tool.name, "question_key": draft.get(f"{config}question_key", kind.question)}
    keys["answer_key"] = draft.get(f"{config}answer_key", "answer")
    keys |= {to: draft.get(f"{wrapper}wrapper_args.{name}", 10 if to == "max_uses" else 0) for name, to in USES.items()}
    arguments = f"{own}tool_{FIRST}tool_args."
    keys |= {
        to: draft.get(f"{arguments}{name}") for name, to in tool.arguments.items() if draft.writes(arguments + name)
    }
    sections = ["train_dataset.", "valid_dataset."] if limits_held_out(draft) else ["train_dataset."]
    path, split = draft.read(f"{config}dataset_name", text), draft.get(f"{config}split")
    system = draft.get(f"{own}agent_system_template")
    for to in sections:
        draft.recipe |= {f"{to}path": path, f"{to}reader": READER, f"{to}apply_chat_template": True}
        draft.recipe |= {f"{to}reader_kwargs.{key}": value for key, value in keys.items()}
        draft.recipe |= {f"{to}split": split} if split is not None else {}
        draft.recipe |= {f"{to}prompt_template": kind.around} if kind.around else {}
        draft.recipe |= {f"{to}system_prompt": system} if system is not None else {}
    _account(draft, own, config, tool, kind.reward)
    sampling(draft)


def _account(draft: Draft, own: str, config: str, tool: Tool, judged: str) -> None:
    """Say what became of each key."""
    to, wrapper = "train_dataset.reader_kwargs.", f"{own}tool_wrapper."
    draft.mapped(f"{own}env_type", "environment.game", GAME)
    draft.mapped(f"{wrapper}tool_configs.0.tool_id", f"{to}tool", tool.name)
    draft.mapped(f"{config}dataset_name", "train_dataset.path", draft.recipe["train_dataset.path"])
    draft.mapped(f"{config}split", "train_dataset.split", draft.get(f"{config}split"))
    for name in ("question_key", "answer_key"):
        draft.mapped(f"{config}{name}", f"{to}{name}", draft.get(f"{config}{name}"))
    for name, key in USES.items():
        draft.mapped(
            f"{wrapper}wrapper_args.{name}", f"{to}{key}", number(draft.get(f"{wrapper}wrapper_args.{name}", 0))
        )
    arguments = f"{wrapper}tool_configs.0.tool_args."
    for name, key in tool.arguments.items():
        draft.mapped(f"{arguments}{name}", f"{to}{key}", draft.get(f"{arguments}{name}"))
    draft.implied(f"{arguments}sandbox_type", "programs always run in Fivefold's sandbox")
    if draft.get(f"{arguments}keep_error_last_line") is not True:
        draft.implied(f"{arguments}keep_error_last_line", "the whole error is shown")
    turn = unescaped(str(draft.get(f"{own}agent_template")))
    draft.mapped(f"{own}agent_template", "environment.turn_template", turn)
    draft.mapped(f"{own}agent_system_template", "train_dataset.system_prompt", draft.get(f"{own}agent_system_template"))
    for name in ("mode", "seed", "load_from_cache_file"):
        draft.implied(f"{config}{name}", "rows are drawn by the recipe's seed")
    draft.implied(f"{config}max_steps", "environment.max_turns ends an episode")
    draft.implied(f"{own}env_manager_cls", "an episode is one chat, whose tokens stay as they were sampled")
    for section in (TRAIN_ENVS, HELD_OUT_ENVS):
        for name in ("tags", "num_groups_partition"):
            draft.implied(f"{section}{name}", "one environment is played")
    draft.notes.append(
        f"environment.game judges as reward.fn={judged} does, and tells of the tool in other words than ROLL"
    )
