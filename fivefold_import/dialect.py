"""What a framework's folder offers to the import."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold_import.draft import Draft
from fivefold_import.source import Document
from fivefold_import.tasks import Sign, Task


def merged(documents: Sequence[Document]) -> Document:
    """Return the keys of all documents; later documents override earlier ones."""
    whole = Document("source")
    for document in documents:
        whole.update(document)
    return whole


def nothing_after_layout(draft: Draft) -> None:
    """Do nothing: in most dialects, no key depends on the layout."""


@dataclass(frozen=True)
class Conversion:
    """How the keys of a framework's sources for one task are converted."""

    convert: Callable[[Draft], None]
    """Gives each key that it knows an entry in the draft, or a place in a role's plan."""
    defaults: Mapping[str, Any]
    """The framework's table of defaults: one for each key that its rules map."""
    after_layout: Callable[[Draft], None] = nothing_after_layout
    """Gives the keys in `Draft.awaiting` their entries, once the devices of the role plans are known."""


@dataclass(frozen=True)
class Dialect:
    """How a framework's keys are converted."""

    title: str
    """The framework's name, as its authors write it."""
    tasks: Mapping[Task, Conversion]
    """The conversion of each task that is imported; reinforcement learning is among them."""
    signs: Sequence[Sign] = ()
    """Keys that show that a source is not for reinforcement learning."""
    merge: Callable[[Sequence[Document]], Document] = merged
    """Merges the files and the overrides."""
    read: Callable[[Path, Mapping[str, str]], Document] | None = None
    """Reads a file with the environment's variables, where `read_document` does not suffice."""
