"""AReaL's agents: a workflow of several turns, or a class that asks the model behind an OpenAI-compatible URL."""

from __future__ import annotations

from fivefold_import import reasons
from fivefold_import.agents import MAX_LENGTH, by_hand, has_turns, leave_open, limit, limit_turns
from fivefold_import.draft import Draft
from fivefold_import.values import positive

WORKFLOWS = ("workflow", "rollout_workflow", "agent")
"""Keys that name what plays the episodes of training."""
SINGLE = ("RLVRWorkflow", "VisionRLVRWorkflow")
"""Workflows of one completion."""
SECTIONS = ("rollout.openai.", "rollout.agent.")
SIGNS = (
    "agent.*",
    "agent_*",
    "workflow_kwargs.max_turns",
    "max_turns",
    "turn_discount",
    *(f"{at}*" for at in SECTIONS),
)
"""Keys that only sources with agents have."""
TURNS = ("max_turns", "agent_run_args.max_turns", "workflow_kwargs.max_turns")
LENGTHS = ("max_tokens_per_trajectory", "gconfig.max_tokens", *(f"{at}engine_max_tokens" for at in SECTIONS))
CONTEXTS = ("sglang.context_length", "vllm.max_model_len")
"""Lengths of the engines, which limit an episode that nothing else limits."""
EPISODES = "n_trajs"


def group_size(draft: Draft) -> int:
    """Return the responses to a prompt, or its episodes, which a program may count by another key."""
    size: int = draft.read("gconfig.n_samples", positive)
    return max(size, draft.read(EPISODES, positive, 1))


def convert_agents(draft: Draft) -> None:
    """Convert the limits of an agent's episodes."""
    if draft.writes(EPISODES):
        size = group_size(draft)
        draft.sets(EPISODES, "gconfig.n_samples", size)
        draft.implied("gconfig.n_samples", f"{EPISODES} is the number of episodes of a prompt")
    if not _has_agent(draft):
        return
    leave_open(draft, "agent")
    if limits := _written(draft, TURNS):
        limit_turns(draft, limits, None, "AReaL")
    else:
        draft.notes.append("environment.max_turns is 8 unless it is set: the source leaves the limit to its agent")
    _limit_length(draft)


def _has_agent(draft: Draft) -> bool:
    named = [str(draft.get(key)).rpartition(".")[2] for key in WORKFLOWS if draft.get(key)]
    written = [key for sign in SIGNS for key in draft.keys(sign) if draft.writes(key)]
    return any(name not in SINGLE for name in named) or bool(written)


def _written(draft: Draft, keys: tuple[str, ...]) -> dict[str, int]:
    return {key: draft.read(key, positive) for key in keys if draft.writes(key)}


def _limit_length(draft: Draft) -> None:
    """Convert the most tokens of an episode: the source's smallest limit, or the context of the engine."""
    limits = _written(draft, LENGTHS)
    if not limits:
        contexts = _written(draft, CONTEXTS)
        if contexts:
            draft.recipe[MAX_LENGTH] = min(contexts.values())
            draft.notes.append(f"{MAX_LENGTH}={draft.recipe[MAX_LENGTH]}: {' and '.join(contexts)}")
        return
    limit(draft, MAX_LENGTH, limits, "ends an episode before")


# Rules, for the tables


def _workflow(draft: Draft, source: str) -> None:
    """Say what becomes of a key that names what plays the episodes."""
    name = str(draft.get(source)).rpartition(".")[2]
    if name == SINGLE[0]:
        draft.implied(source, reasons.ONE_COMPLETION)
    elif name in SINGLE:
        draft.unsupported(source, reasons.NO_MULTIMODAL)
    by_hand(draft, source)


def _evaluation(draft: Draft, source: str) -> None:
    if draft.get(source) in [draft.get(key) for key in WORKFLOWS]:
        draft.implied(source, "held-out rows are played as in training")
    draft.unsupported(source, "held-out rows are played as in training")


def _own_value(draft: Draft, source: str) -> None:
    if not has_turns(draft):
        draft.unsupported(source, "a workflow of one completion is the reward: give reward.fn and reward.kwargs")
    draft.unsupported(source, reasons.OWN_VALUES)
