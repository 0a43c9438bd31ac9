"""The sources' profilers: the steps that they record become `profile.steps`."""

from __future__ import annotations

from collections.abc import Mapping

from fivefold_import import reasons
from fivefold_import.draft import Draft, Rule
from fivefold_import.rules import implied, off, only

STEPS = "global_profiler.steps"


def steps(draft: Draft, source: str) -> None:
    """Convert the steps that are recorded, which verl counts from 1 as well."""
    chosen = draft.get(source)
    if not chosen:
        draft.implied(source, "no step is recorded, as by default")
    elif isinstance(chosen, list) and all(type(step) is int and step > 0 for step in chosen):
        draft.mapped(source, "profile.steps", chosen, "traces of torch's profiler and, on GPUs, snapshots of memory")
    else:
        draft.unsupported(source, f"{chosen!r} is not a list of steps: {reasons.RECORDED}")


def _ranks(draft: Draft, source: str) -> None:
    chosen = draft.get(source)
    if not chosen or not draft.get(STEPS):
        draft.implied(source, "no step is recorded, or by rank 0 alone")
    else:
        draft.mapped(source, "profile.ranks", chosen)


PROFILER: Mapping[str, Rule] = {
    "steps": steps,
    "tool": only("torch", "torch_memory", holds=reasons.RECORDED, otherwise="traces are those of torch's profiler"),
    "*": implied(reasons.RECORDED),
}
"""verl's section of the profiler."""

OF_ACTOR: Mapping[str, Rule] = {
    "profiler.ranks": _ranks,
    "profiler.all_ranks": off("profile.ranks names the ranks that record"),
    "profiler*": implied(reasons.RECORDED),
    "profile*": implied(reasons.RECORDED),
}
"""verl's keys about the profiler in a role's section."""
