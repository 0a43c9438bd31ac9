"""Where a run starts: at its first step, at a checkpoint, or not at all because it has finished."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, ClassVar, TypeVar

from fivefold.checkpoints.changes import Change, is_below
from fivefold.checkpoints.fingerprints import Fingerprints
from fivefold.checkpoints.run_state import RunState
from fivefold.checkpoints.store import Checkpoint
from fivefold.config.schema.run import RunConfig
from fivefold.data.sampler import EpochSampler, SamplerState
from fivefold.observe.run_dir import RunDir

Item = TypeVar("Item")

MOVING = ("batches", "chosen")
"""Parts of a sampler's state that change from step to step."""
KEYS_OF_FINGERPRINTS = {"config": "actor.path", "weights": "actor.path", "tokenizer": "tokenizer_path"}
"""The key of the recipe that each fingerprint belongs to."""
CONTENTS = {
    "config": "the config.json of the model",
    "weights": "the weights of the model that the run began with",
    "tokenizer": "the files of the tokenizer",
}


@dataclass(frozen=True)
class FromScratch:
    """The run starts at its first step."""

    reason: str
    """Why, in words for the user."""
    overwrite: bool = False
    """Whether the results in the run's folder are deleted."""
    began: datetime = field(default_factory=lambda: datetime.now(UTC), compare=False)
    """Time of the run's first start, which is this one."""

    step: ClassVar[int] = 0
    """Number of steps that are done."""
    started_from: ClassVar[None] = None
    """A run from scratch starts from no other run's checkpoint."""

    def open_folder(self, recipe: RunConfig) -> RunDir:
        """Create the run's folder.

        Raises:
            ValueError: the folder is in use, or cannot be written to.
        """
        return RunDir.create(recipe, overwrite=self.overwrite)

    def facts(self) -> dict[str, object]:
        """Return what the banner of the run says about its start."""
        return {"start": self.reason}


@dataclass(frozen=True)
class Resume:
    """The run continues from a checkpoint."""

    checkpoint: Checkpoint
    state: RunState
    changes: tuple[Change, ...]
    """Keys of the recipe that differ from the checkpoint's, as they may."""
    in_place: bool
    """Whether the checkpoint is in the run's own folder, whose results up to its step stay."""
    overwrite: bool = False
    """Whether the results in the run's folder are deleted, if the checkpoint is elsewhere."""

    @property
    def step(self) -> int:
        """Number of steps that are done."""
        return self.state.step

    @property
    def began(self) -> datetime:
        """Time of the run's first start, in UTC."""
        return datetime.fromisoformat(self.state.began)

    @property
    def started_from(self) -> str | None:
        """Folder of another run's checkpoint from which the run started at first."""
        return self.state.started_from if self.in_place else str(self.checkpoint.path)

    def open_folder(self, recipe: RunConfig) -> RunDir:
        """Open the run's own folder, or create it if the checkpoint is elsewhere.

        Raises:
            ValueError: the folder is in use, or cannot be written to.
        """
        if self.in_place:
            return RunDir.resume(recipe, self.step)
        return RunDir.create(recipe, overwrite=self.overwrite)

    def facts(self) -> dict[str, object]:
        """Return what the banner of the run says about its start."""
        changed = {"changed": "\n".join(map(str, self.changes))} if self.changes else {}
        return {"start": f"continues after step {self.step}, from {self.checkpoint.path}", **changed}

    def check_contents(self, recipe: RunConfig, found: Fingerprints) -> None:
        """Refuse a model or a tokenizer that has changed, under the same path or under another.

        Raises:
            ValueError: it says which, and how to accept the change.
        """
        accepted = recipe.recover.accept_changes
        names = self.state.fingerprints.differing(found)
        refused = [name for name in names if not is_below(KEYS_OF_FINGERPRINTS[name], accepted)]
        if refused:
            keys = dict.fromkeys(KEYS_OF_FINGERPRINTS[name] for name in refused)
            raise ValueError(
                f"{' and '.join(CONTENTS[name] for name in refused)} differ from the checkpoint "
                f"{self.checkpoint.path}: continue with the old ones, or, if the change is meant, set "
                f"recover.accept_changes=[{', '.join(keys)}]"
            )

    def restore_order(
        self, recipe: RunConfig, sampler: EpochSampler[Item], state: SamplerState | None = None
    ) -> str | None:
        """Let `sampler` continue from `state`, where the checkpoint's stopped in the training data.

        Returns a text for the user if it cannot.

        If a change of the data was accepted, the sampler stays at its beginning, in the first pass.

        Raises:
            ValueError: the data or their order has changed, which was not accepted.
        """
        state = self.state.sampler if state is None else state
        saved: Mapping[str, object] = state
        here: Mapping[str, object] = sampler.state_dict()
        differing = [key for key in here if key not in MOVING and saved[key] != here[key]]
        if not differing:
            sampler.load_state_dict(state)
            return None
        accepted = recipe.recover.accept_changes
        if all(_is_accepted(key, accepted) for key in differing):
            return "the training data or its order has changed, so it is read from its beginning"
        values = "".join(f"\n- {_difference(key, saved, here)}" for key in differing)
        raise ValueError(
            f"the training data is not the one of the checkpoint {self.checkpoint.path}:{values}\nContinue with the "
            "old data, or, if the change is meant, set recover.accept_changes=[train_dataset, seed]: the data is then "
            "read from its beginning"
        )


@dataclass(frozen=True)
class Finished:
    """There is nothing to do."""

    reason: str
    """In words for the user."""
    summary: dict[str, Any]
    """Content of `summary.json`."""


Start = FromScratch | Resume | Finished


def _is_accepted(key: str, accepted: Sequence[str]) -> bool:
    """Return whether a difference in the sampler's state is accepted by a key of the recipe."""
    if key == "seed":
        return "seed" in accepted
    if key == "shuffle":
        return is_below("train_dataset.shuffle", accepted)
    return any(each == "tokenizer_path" or is_below(each, ("train_dataset",)) for each in accepted)


def _difference(key: str, saved: Mapping[str, object], here: Mapping[str, object]) -> str:
    if key == "fingerprint":
        content, now = (str(state[key]).partition(" ")[0] for state in (saved, here))
        return f"the {'contents of its rows' if content != now else 'weights of its sources or its sampler'} differ"
    words = {"n_items": "number of rows", "shuffle": "train_dataset.shuffle"}
    return f"{words.get(key, key)}: {saved[key]} -> {here[key]}"
