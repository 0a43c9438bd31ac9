"""verl's episodes of several turns: tools, users that answer (`interaction`), and agent loops."""

from __future__ import annotations

from fivefold_import import reasons
from fivefold_import.agents import Player, by_hand, has_turns, leave_open, limit_length, limit_turns, player
from fivefold_import.draft import Draft

TURNS, AGENT = "actor_rollout_ref.rollout.multi_turn.", "actor_rollout_ref.rollout.agent."
SWITCH, LOOP = f"{TURNS}enable", f"{AGENT}default_agent_loop"
PROGRAMS = (f"{TURNS}interaction_config_path", f"{AGENT}agent_loop_config_path")
"""Files that name classes whose program asks the model."""
TOOLS = tuple(f"{at}{name}_path" for at in (TURNS, "data.") for name in ("tool_config", "function_tool"))
"""Files that name tools."""
LOOPS = ("single_turn_agent", "tool_agent")
"""verl's own agent loops."""
LIMITS = {"max_assistant_turns": 0, "max_turns": 0, "max_user_turns": 1}
"""Limits of turns, with the completions that follow the last turn that they count."""


def convert_agents(draft: Draft, length: int | None) -> None:
    """Convert the limits of an episode; `length` is the tokens of the longest prompt and response, if known."""
    one = _player(draft)
    if one is None:
        for name in LIMITS:
            draft.implied(TURNS + name, reasons.ONE_COMPLETION)
        return
    leave_open(draft, one)
    if one == "tools" and not draft.writes(f"{TURNS}max_tool_response_length"):
        draft.notes.append("verl cuts what a tool returns to 256 characters; here the model reads all of it")
    limits = {
        key: value + later
        for name, later in LIMITS.items()
        if isinstance(value := draft.get(key := TURNS + name), int) and value > 0
    }
    limit_turns(draft, limits, length, "verl")
    limit_length(draft, length, "data.max_prompt_length and data.max_response_length, which has all turns")


def _player(draft: Draft) -> Player | None:
    """Return what plays the episodes; None if each prompt gets one completion."""
    loop = draft.get(LOOP, LOOPS[0])
    if any(draft.get(key) for key in PROGRAMS) or loop not in LOOPS:
        return "agent"
    if draft.get(SWITCH) is True or any(draft.get(key) for key in TOOLS) or loop == "tool_agent":
        return "tools"
    return None


# Rules, for the tables


def _episodes(draft: Draft, source: str) -> None:
    """Convert the switch of several turns."""
    if draft.get(source) is not True or any(draft.get(key) for key in (*PROGRAMS, *TOOLS)):
        draft.implied(source, f"environment.{player(draft)} plays the episodes" if has_turns(draft) else "it is off")
    by_hand(draft, source)


def _tools(draft: Draft, source: str) -> None:
    """Say what to write in the place of a file of tools."""
    if player(draft) == "agent" and draft.get(source):
        draft.unsupported(source, "let the function in environment.agent offer the tools and answer their calls")
    if source.endswith("function_tool_path") and draft.get(source):
        draft.unsupported(source, f"list its functions in environment.tools=[{draft.get(source)}:function, ...]")
    by_hand(draft, source)


def _loop(draft: Draft, source: str) -> None:
    if draft.get(source) in LOOPS:
        draft.implied(source, f"environment.{player(draft)} is in its place" if has_turns(draft) else "as here")
    by_hand(draft, source)
