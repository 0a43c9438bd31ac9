"""What differs between the recipe of a checkpoint and the one that continues from it.

A run may continue with another learning rate, batch size, layout, number of devices, rollout engine or number of steps.
Which model learns from which data in which order may not change, unless `recover.accept_changes` names it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.config.load import resolved_yaml
from fivefold.config.problems import show
from fivefold.config.schema.run import RunConfig
from fivefold.config.source import defaults, read_mapping
from fivefold.config.yaml_reader import read_yaml

FIXED = (
    "actor.init_from_scratch",
    "actor.megatron.dist_checkpointing_path",
    "actor.megatron.use_dist_checkpointing",
    "chat_template",
    "chat_template_kwargs",
    "critic.init_from_scratch",
    "critic.megatron.dist_checkpointing_path",
    "critic.megatron.use_dist_checkpointing",
    "critic.path",
    "environment.agent",
    "environment.game",
    "environment.tools",
    "ref.path",
    "seed",
    "train_dataset",
    "valid_dataset",
    "valid_datasets",
)
"""Keys and sections that may not change."""
FREE = ("train_dataset.batch_size",)
"""Keys of these that may change: the data are read on from the same row."""
BY_CONTENT = ("actor.path", "tokenizer_path", "train_dataset.path")
"""Keys whose content, not text, may not change, as fingerprints show: a model may have moved."""
OF_THE_START = (
    "experiment_name",
    "trial_name",
    "cluster.fileroot",
    "recover.mode",
    "recover.verify",
    "recover.accept_changes",
)
"""Keys of one start of a run, which are not compared."""
ABSENT = object()
"""Value of a key that a recipe does not have."""


class RecipeChangedError(ValueError):
    """A recipe differs from its checkpoint's in what may not change."""


@dataclass(frozen=True)
class Change:
    """A key whose value differs."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.old)} -> {_shown(self.new)}"


@dataclass(frozen=True)
class Changes:
    """All keys that differ, in the order of the recipe."""

    allowed: tuple[Change, ...] = ()
    refused: tuple[Change, ...] = ()

    def check(self) -> None:
        """Refuse changes that were not accepted.

        Raises:
            RecipeChangedError: it lists them, with the way to accept them.
        """
        if self.refused:
            lines = "".join(f"\n- {change}" for change in self.refused)
            sections = ", ".join(dict.fromkeys(_fixed_prefix(change.key) for change in self.refused))
            raise RecipeChangedError(
                f"the checkpoint belongs to a run of another model, data or seed:{lines}\nContinue with its values, "
                "or start a new run with another trial_name; if the change is meant, set "
                f"recover.accept_changes=[{sections}]"
            )


def compare_recipes(saved: Path, recipe: RunConfig) -> Changes:
    """Compare the recipe in the file `saved`, which an older version of Fivefold may have written, with `recipe`.

    A key that the file lacks has its default.

    Raises:
        ValueError: the file cannot be read.
    """
    default = dict(_flat(defaults(type(recipe))))
    old = default | dict(_flat(read_mapping(saved)))
    new = default | dict(_flat(read_yaml(resolved_yaml(recipe), "recipe")))
    keys = [*new, *(key for key in old if key not in new)]
    changes = [
        Change(key, old.get(key, ABSENT), new.get(key, ABSENT))
        for key in keys
        if not is_below(key, OF_THE_START) and old.get(key, ABSENT) != new.get(key, ABSENT)
    ]
    accepted = recipe.recover.accept_changes
    refused = [change for change in changes if _is_fixed(change.key) and not is_below(change.key, accepted)]
    return Changes(tuple(change for change in changes if change not in refused), tuple(refused))


def is_below(key: str, prefixes: Collection[str]) -> bool:
    """Return whether `key` is one of the keys `prefixes`, or in one of the sections among them."""
    return any(key == prefix or key.startswith(f"{prefix}.") for prefix in prefixes)


def _is_fixed(key: str) -> bool:
    return is_below(key, FIXED) and key not in (*BY_CONTENT, *FREE)


def _fixed_prefix(key: str) -> str:
    return next(prefix for prefix in FIXED if is_below(key, (prefix,)))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys and the values of nested mappings."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        elif value != {}:
            yield f"{prefix}{name}", value


def _shown(value: Any) -> str:
    return "absent" if value is ABSENT else show(value)
