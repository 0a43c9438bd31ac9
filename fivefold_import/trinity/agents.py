"""Trinity-RFT's workflows: some have one completion, others play episodes of several turns."""

from __future__ import annotations

from collections.abc import Mapping

from fivefold_import import reasons
from fivefold_import.agents import Player, by_hand, has_turns, leave_open, limit_length, limit_turns
from fivefold_import.draft import Draft
from fivefold_import.values import positive, whole

INPUT = "buffer.explorer_input."
TASKS = f"{INPUT}taskset."
WORKFLOW, ARGUMENTS = "default_workflow_type", "workflow_args."
SINGLE = ("simple_workflow", "math_workflow", "on_policy_distill_workflow", "on_policy_distill_math_workflow")
"""Workflows of one completion whose reward is another key's."""
BOXED = "math_boxed_workflow"
"""The workflow of one completion that asks for an answer in a box."""
BOX = "Please reason step by step, and put your final answer within \\boxed{}."
"""The system prompt of that workflow, where the task set has none."""
DAPO_REWARD = "math_dapo_reward"
PENALTY = "enable_overlong_penalty"
OVERLONG: Mapping[str, str] = {
    PENALTY: "actor.overlong_reward_penalty",
    "penalty_factor": "actor.overlong_penalty_factor",
    "cache_length": "actor.overlong_tokens",
    "max_response_length": "",
}
"""Arguments of that reward which penalise long responses, as DAPO does."""
JUDGED = ("math_boxed", "math_eval", "math_rm", "ruler", "rubric", "tool_call", "toolcall", "thinking_budget")
"""Words in the names of workflows of one completion that have their own rewards."""
PLAYERS: Mapping[str, Player] = {
    **dict.fromkeys(("alfworld", "frozen_lake", "sciworld", "webshop", "sudoku", "intercode"), "game"),
    **dict.fromkeys(("agent", "react", "search", "harbor", "multi_turn", "step_wise"), "agent"),
}
"""Words in the names of workflows of several turns, with what plays in their place; the first one counts."""
ALIKE = "held-out rows are played as in training"
TURNS = ("max_turns", "max_env_steps", "max_steps")
"""Arguments of workflows that limit the turns."""
UPDATE = "buffer.train_batch_size"


def convert_agents(draft: Draft) -> None:
    """Convert the workflow, and the limits of its episodes."""
    one = _player(draft)
    if one is None:
        return
    leave_open(draft, one)
    keys = [f"{TASKS}{ARGUMENTS}{name}" for name in TURNS if draft.writes(f"{TASKS}{ARGUMENTS}{name}")]
    if keys:
        limit_turns(draft, {key: draft.read(key, positive) for key in keys}, None, "Trinity-RFT")
    else:
        draft.notes.append("environment.max_turns is 8 unless it is set: the source leaves the limit to its workflow")
    if draft.writes("model.max_model_len"):
        limit_length(draft, draft.read("model.max_model_len", positive), "model.max_model_len")
    elif all(isinstance(draft.get(f"model.max_{part}_tokens"), int) for part in ("prompt", "response")):
        length = draft.get("model.max_prompt_tokens") + draft.get("model.max_response_tokens")
        limit_length(draft, length, "model.max_prompt_tokens and model.max_response_tokens")
    if one == "agent" or "step_wise" in _workflow(draft):
        draft.unsupported(UPDATE, "it counts turns: set actor.ppo_n_minibatches, the updates with whole episodes")


def _workflow(draft: Draft) -> str:
    """Return the name of the workflow of training; empty if none is written."""
    return str(draft.get(TASKS + WORKFLOW, draft.get(INPUT + WORKFLOW, ""))).lower()


def _player(draft: Draft) -> Player | None:
    """Return what plays the episodes; None if a workflow has one completion, or is not known."""
    workflow = _workflow(draft)
    if _is_single(workflow) or any(word in workflow for word in JUDGED):
        return None
    if (found := next((one for word, one in PLAYERS.items() if word in workflow), None)) is not None:
        return found
    return "agent" if any(draft.writes(f"{TASKS}{ARGUMENTS}{name}") for name in TURNS) else None


def _boxes(draft: Draft, workflow: str) -> bool:
    """Return whether a workflow asks for an answer in a box, in a chat, and rewards it alone."""
    asks_more = any(draft.get(f"{TASKS}{ARGUMENTS}{name}") is True for name in ("use_base", "with_think"))
    return workflow.removeprefix("async_") == BOXED and not asks_more


def _is_single(workflow: str) -> bool:
    return workflow.removeprefix("async_") in (*SINGLE, "")


# Rules, for the tables


def _of_training(draft: Draft, source: str) -> None:
    """Say what becomes of the workflow of training."""
    workflow = str(draft.get(source)).lower()
    if _is_single(workflow):
        draft.implied(source, "a step is prompt, response and reward")
    if "_mm_" in workflow:
        draft.unsupported(source, reasons.NO_MULTIMODAL)
    if _boxes(draft, workflow):
        if not draft.writes(f"{TASKS}format.system_prompt"):
            draft.mapped(source, "train_dataset.system_prompt", BOX, "reward.fn=math reads the box")
        draft.implied(source, "reward.fn=math reads the box for which the system prompt asks")
    if any(word in workflow for word in JUDGED):
        draft.unsupported(source, "it gives one completion a reward: write that as reward.fn=file.py:function")
    if has_turns(draft):
        by_hand(draft, source)
    draft.unsupported(source, f"if it has one completion, write its reward as reward.fn; else {reasons.WRITE_AGENT}")


def _of_evaluation(draft: Draft, source: str) -> None:
    """Say what becomes of the workflow of held-out rows."""
    if str(draft.get(source)).lower() == _workflow(draft):
        draft.implied(source, ALIKE)
    elif _is_single(str(draft.get(source))) and not has_turns(draft):
        draft.implied(source, "a step is prompt, response and reward")
    draft.unsupported(source, ALIKE)


def _argument(draft: Draft, source: str) -> None:
    """Say what becomes of a workflow's argument; the limits of training are converted before."""
    name = source.rpartition(ARGUMENTS)[2]
    if not source.startswith(TASKS):
        if draft.get(source) == draft.get(f"{TASKS}{ARGUMENTS}{name}"):
            draft.implied(source, ALIKE)
        draft.unsupported(source, ALIKE)
    if _boxes(draft, _workflow(draft)) and name in ("use_base", "with_think", "format_score_coef"):
        draft.implied(source, "the workflow asks in a chat, for a box alone")
    draft.unsupported(source, reasons.OWN_VALUES)


def _rewards_argument(draft: Draft, source: str) -> None:
    """Convert an argument of the reward: DAPO's penalty of long responses, if the reward has it."""
    if has_turns(draft):
        draft.unsupported(source, reasons.OWN_VALUES)
    section, _, name = source.rpartition(".")
    rewards = [draft.get(f"{at}default_reward_fn_type") for at in (TASKS, INPUT)]
    if name in OVERLONG and source.startswith(TASKS) and DAPO_REWARD in rewards:
        if draft.get(f"{section}.{PENALTY}") is not True:
            draft.implied(source, "long responses are not penalised")
        elif OVERLONG[name]:
            draft.mapped(source, OVERLONG[name], draft.get(source))
        elif draft.get(source) == draft.get("model.max_response_tokens"):
            draft.implied(source, "the penalty is full at gconfig.max_new_tokens")
        draft.unsupported(source, "the penalty is full at gconfig.max_new_tokens: set actor.overlong_tokens")
    draft.unsupported(source, "give the reward function's arguments as reward.kwargs")


def _retries(draft: Draft, source: str) -> None:
    """Convert how often a workflow that has failed runs again."""
    if has_turns(draft):
        draft.mapped(source, "environment.retries", whole(draft.get(source)))
    draft.implied(source, reasons.NO_RETRY)
