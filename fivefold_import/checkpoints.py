"""Conversions that frameworks share: checkpoints that a run resumes from, and weights that it saves.

What a run saves changes nothing about its training. So Fivefold's defaults hold where a source does not say how often
and whether checkpoints are written; a frequency of the source takes the place of Fivefold's, which is in seconds.
"""

from __future__ import annotations

import re
from typing import Any

from fivefold_import import reasons
from fivefold_import.defaults import own_default
from fivefold_import.draft import Draft, Rule
from fivefold_import.values import Unfit, whole

MODE, FREQ_STEPS, MAX_TO_KEEP = "recover.mode", "recover.freq_steps", "recover.max_to_keep"
CONTENTS = {"model", "optimizer", "extra"}
"""The names in verl of everything that a run needs to resume."""


def resumes(frequency: str) -> Rule:
    """Convert whether a run resumes from its newest checkpoint.

    Args:
        frequency: the source's key of the steps between checkpoints. A run that neither resumes nor writes
            checkpoints is `disabled`; one that writes some starts from scratch where its folder is free.
    """

    def rule(draft: Draft, source: str) -> None:
        value = draft.get(source)
        if value is True or value == "auto":
            draft.mapped(source, MODE, "auto")
        elif value not in (False, "disable", "disabled", "off", ""):
            draft.unsupported(source, reasons.OTHER_CHECKPOINTS)
        elif _steps(draft, frequency) > 0:
            draft.implied(
                source, "a run starts from scratch in a free folder, and with --overwrite where there are checkpoints"
            )
        else:
            draft.mapped(source, MODE, "disabled", "no checkpoints are written")

    return rule


def weights_in_checkpoints(frequency: str, most: str) -> Rule:
    """Convert verl's list of what checkpoints hold: `hf_model` saves the weights as often as checkpoints are written.

    Args:
        frequency: the source's key of the steps between checkpoints.
        most: the source's key of the number of checkpoints that are kept.
    """

    def rule(draft: Draft, source: str) -> None:
        if "hf_model" in _names(draft.get(source)):
            save_weights(draft, source, frequency, most)
        draft.implied(source, reasons.WHOLE_CHECKPOINTS)

    return rule


def save_weights(draft: Draft, source: str, frequency: str, most: str) -> None:
    """Map `source` to saving the weights with every checkpoint, and keeping as many; the arguments are as above."""
    steps, kept = _steps(draft, frequency), _steps(draft, most)
    if steps > 0:
        draft.recipe.setdefault("saver.max_to_keep", kept if kept > 0 else None)
        draft.mapped(source, "saver.freq_steps", steps, "weights are saved as often as checkpoints are written")
    draft.implied(source, reasons.LAST_WEIGHTS)


def loaded_contents(written: str) -> Rule:
    """Convert verl's list of what is loaded from a checkpoint: everything, or what `written` says it holds."""

    def rule(draft: Draft, source: str) -> None:
        loaded = draft.get(source)
        is_written = written in str(loaded) or _names(loaded) == _names(draft.get(written))
        if is_written or _names(loaded) >= CONTENTS:
            draft.implied(source, reasons.WHOLE_CHECKPOINTS)
        else:
            draft.unsupported(source, reasons.WHOLE_CHECKPOINTS)

    return rule


def kept(draft: Draft, source: str) -> None:
    """Convert the number of checkpoints that are kept, where 0 and negative numbers mean all."""
    count = whole(draft.get(source))
    if count > 0:
        draft.mapped(source, MAX_TO_KEEP, count)
    else:
        draft.unsupported(source, f"not all checkpoints are kept: {MAX_TO_KEEP} is their number")


def only_newest(draft: Draft, source: str) -> None:
    """Convert a switch that keeps no checkpoint but the newest."""
    if draft.get(source) is True:
        draft.mapped(source, MAX_TO_KEEP, 1)
    draft.implied(source, f"{MAX_TO_KEEP} is the number of checkpoints that are kept")


def note_kept(draft: Draft, framework: str, count: str = "all") -> None:
    """Add a note that the framework keeps more checkpoints than Fivefold, unless the source gives their number."""
    if FREQ_STEPS in draft.recipe and MAX_TO_KEEP not in draft.recipe:
        draft.notes.append(
            f"{framework} keeps {count} checkpoints where their number is not given; here, the newest "
            f"{own_default(MAX_TO_KEEP)} are kept unless {MAX_TO_KEEP} is set"
        )


def _names(value: Any) -> set[str]:
    """Return the names in a list, or in a list's text."""
    return set(re.findall(r"\w+", str(value)))


def _steps(draft: Draft, key: str) -> int:
    """Return a number of the source; 0 if it has none there."""
    value: Any = draft.get(key, 0)
    try:
        return whole(value)
    except Unfit:
        return 0
