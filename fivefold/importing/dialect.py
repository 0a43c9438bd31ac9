"""What a framework's module offers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fivefold.importing.draft import Draft
from fivefold.importing.source import Document


def merged(documents: Sequence[Document]) -> Document:
    """The keys of all documents, those of later ones over earlier."""
    whole = Document("source")
    for document in documents:
        whole.update(document)
    return whole


def no_more(draft: Draft) -> None:
    """For dialects in which nothing depends on the layout."""


@dataclass(frozen=True)
class Dialect:
    """A framework's way to say things."""

    title: str
    """Its name, as its authors write it."""
    convert: Callable[[Draft], None]
    """Gives every key that it knows an entry, or a place in a role's plan."""
    defaults: Mapping[str, Any]
    """What holds for keys that are left out, where Fivefold's own default is another."""
    after_layout: Callable[[Draft], None] = no_more
    """Gives the keys in `Draft.awaiting` their entries, with the role plans' devices known."""
    merge: Callable[[Sequence[Document]], Document] = merged
    """Brings the files and overrides together."""
