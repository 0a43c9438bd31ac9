"""A framework's sources as a draft, and whether they are that framework's at all."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from fivefold_import.algorithms import settle_clip_range, settle_staleness
from fivefold_import.dialect import Dialect
from fivefold_import.draft import Draft
from fivefold_import.framework import Framework, dialect_of
from fivefold_import.layouts import lay_out
from fivefold_import.models import reads_images, sees
from fivefold_import.reasons import NO_MULTIMODAL
from fivefold_import.source import Document, read_document, read_overrides, resolve
from fivefold_import.tasks import task_of


@dataclass(frozen=True)
class Drafted:
    """What one framework's rules made of the sources."""

    dialect: Dialect
    draft: Draft
    documents: tuple[Document, ...]
    n_keys: int
    """Keys of the sources."""
    n_strangers: int
    """Keys among them that no rule of the framework is for."""

    @property
    def n_mapped(self) -> int:
        """Keys of the sources that set a key of the recipe."""
        return sum(entry.outcome == "mapped" and not entry.is_default for entry in self.draft.entries)

    @property
    def is_strange(self) -> bool:
        """Whether most of the keys are not the framework's."""
        return 2 * self.n_strangers > self.n_keys


def draft_of(
    framework: Framework, files: Sequence[Path], overrides: Sequence[str], environment: Mapping[str, str]
) -> Drafted:
    """Return a draft in which each key of the sources has its entry.

    Raises:
        ValueError: a file cannot be read or is for a task that is not imported, or a value that other keys depend on
            cannot be converted.
    """
    dialect = dialect_of(framework)
    read = dialect.read or read_document
    documents = tuple(read(file, environment) for file in files)
    source = dialect.merge([*documents, read_overrides(overrides)])
    values = resolve(source.values, environment)
    task = task_of(framework, dialect.tasks, dialect.signs, values, source.program)
    conversion = dialect.tasks[task]
    assert task.schema is not None
    draft = Draft(values, conversion.defaults, source.caveats, task.schema)
    conversion.convert(draft)
    lay_out(draft)
    conversion.after_layout(draft)
    settle_clip_range(draft)
    settle_staleness(draft)
    _settle_images(draft)
    unknown_key = f"not a key of {dialect.title} that is known here"
    draft.finish(unknown_key)
    draft.notes[:0] = source.notes
    draft.problems[:0] = source.problems
    draft.written = source.written
    n_strangers = sum(entry.note == unknown_key for entry in draft.entries)
    return Drafted(dialect, draft, documents, len(values), n_strangers)


def _settle_images(draft: Draft) -> None:
    """Map the columns of images, and add a problem for a model that reads images which none are given."""
    model = str(draft.recipe.get("actor.path", ""))
    is_seeing = sees(model)
    for key in [*draft.keys("*image_key"), *draft.keys("multimodal_keys")]:
        column = _column_of_images(draft.get(key))
        if not draft.get(key):
            draft.implied(key, "prompts are texts")
        elif not is_seeing or column is None:
            draft.unsupported(key, NO_MULTIMODAL)
        else:
            draft.mapped(key, "train_dataset.image_key", column)
            if "valid_dataset.path" in draft.recipe:
                draft.recipe["valid_dataset.image_key"] = column
    if not reads_images(model):
        return
    if not is_seeing:
        draft.problems.append(f"actor.path={model} reads images, but {NO_MULTIMODAL}: name one, or a language model")
    elif "train_dataset.image_key" not in draft.recipe:
        draft.problems.append(f"actor.path={model} reads images: name their column in train_dataset.image_key")


def _column_of_images(value: Any) -> str | None:
    """Return the column that a key names; None: a mapping of kinds to columns, as slime has, names others too."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except ValueError:
            return None
    if isinstance(value, Mapping):
        return str(value["image"]) if value.keys() == {"image"} else None
    return str(value)


def check_framework(
    drafted: Drafted, files: Sequence[Path], overrides: Sequence[str], environment: Mapping[str, str]
) -> None:
    """Refuse files whose keys are mostly another framework's than the one that the user named.

    Raises:
        ValueError: it names the other framework, or those that have the same keys.
    """
    if not files or not drafted.is_strange or 10 * drafted.n_mapped > drafted.n_keys:
        return
    others: dict[Framework, Drafted] = {}
    for framework in get_args(Framework):
        try:
            other = draft_of(framework, files, overrides, environment)
        except ValueError:  # the files are for none of this framework's tasks, so they are not its own
            continue
        if not other.is_strange and other.n_mapped > drafted.n_mapped:
            others[framework] = other
    most = max((other.n_mapped for other in others.values()), default=0)
    nearest = {framework: other for framework, other in others.items() if other.n_mapped == most}
    if nearest:
        titles = " or ".join(f"{other.dialect.title}'s" for other in nearest.values())
        options = " or ".join(f"--from {framework}" for framework in nearest)
        raise ValueError(
            f"{drafted.n_strangers} of {drafted.n_keys} keys are not {drafted.dialect.title}'s; this looks like "
            f"{titles}: {options}"
        )
