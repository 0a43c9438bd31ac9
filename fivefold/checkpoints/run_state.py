"""The driver's part of a checkpoint, `run.json`: everything that a run needs to continue besides the ranks' states."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter

from fivefold.algorithms.state import AlgorithmState
from fivefold.checkpoints.fingerprints import Fingerprints
from fivefold.checkpoints.manifest import DamagedCheckpointError
from fivefold.config.schema.recipe import Recipe
from fivefold.config.schema.run import EarlyStoppingConfig, should_fall
from fivefold.data.sampler import SamplerState, place_after
from fivefold.json_text import read_json
from fivefold.observe.durable import write_file

FILE = "run.json"


@dataclass(frozen=True)
class MetricHistory:
    """Values of the metric of `recover.keep_best`, by the step whose metrics had it."""

    name: str
    values: Mapping[int, float]

    def with_value(self, step: int, value: float) -> MetricHistory:
        """Return a copy with the value of one more step."""
        return MetricHistory(self.name, {**self.values, step: value})

    def exceeds(self, value: float, steps: Collection[int]) -> bool:
        """Return whether a value is better than all others among `steps`."""
        others = [other for step, other in self.values.items() if step in steps]
        return all(value < other if should_fall(self.name) else value > other for other in others)

    def best(self, steps: Collection[int]) -> int | None:
        """Return the step of the best value among `steps`, the later one of equals; None if none has a value."""
        sign = -1 if should_fall(self.name) else 1
        known = {step: sign * value for step, value in self.values.items() if step in steps}
        return max(known, key=lambda step: (known[step], step), default=None)


@dataclass(frozen=True)
class BestEvaluation:
    """The best evaluation so far, for `evaluator.early_stopping`."""

    metric: str
    value: float
    step: int
    """The step after which it was made."""
    n_since: int = 0
    """Number of evaluations since then."""


@dataclass(frozen=True)
class RunState:
    """A run after `step` training steps."""

    step: int
    total_steps: int
    sampler: SamplerState
    """Position in the training data after the prompts of `step`."""
    weight_version: int
    """Version of the weights, as the rollout engines count it."""
    skips_in_a_row: int
    """Number of optimizer steps, up to this one, that were skipped one after the other."""
    seconds: float
    """Time that the run has taken, over all its starts, in seconds."""
    began: str
    """Time of the first start, ISO 8601 in UTC."""
    versions: Mapping[str, str]
    """Versions of Fivefold, Python and the main libraries by name."""
    backend: str
    """Backend and layout of the actor."""
    world_size: int
    """Number of the actor's processes."""
    fingerprints: Fingerprints
    evaluation_before: Mapping[str, Any] | None = None
    """Evaluation before the first step; None if there was none."""
    evaluation_last: Mapping[str, Any] | None = None
    """The last evaluation up to this step; None if there was none."""
    kept_metric: MetricHistory | None = None
    """History of the metric of `recover.keep_best`; None if the recipe names none."""
    critic_skips_in_a_row: int = 0
    """The same as `skips_in_a_row`, of the critic."""
    algorithm: AlgorithmState | None = None
    """What the algorithm carries from step to step; None before the first step."""
    expert_sampler: SamplerState | None = None
    """Position in the expert's examples after step `step`; None: the run has none."""
    earlier_steps: list[list[int]] = field(default_factory=list)
    """Steps with other batch sizes than the last one, as [batch size, number of steps], in their order."""
    best_evaluation: BestEvaluation | None = None
    """The best evaluation up to this step; None: no early stopping, or no evaluation."""
    stopped_early: str | None = None
    """Why the run ended before the last step that its recipe asks for, in words for the user; None: it did not."""
    started_from: str | None = None
    """Folder of another run's checkpoint, from which this run started; None if it started from scratch."""

    @property
    def steps_by_size(self) -> list[list[int]]:
        """All steps, as [batch size, number of steps], in their order."""
        size, _ = self.sampler["batches"][-1]
        return [*self.earlier_steps, [size, self.step - sum(n for _, n in self.earlier_steps)]]

    def last_step(self, recipe: Recipe, n_items: int) -> int:
        """Return the last step that a recipe asks for, which may have another batch size, with `n_items` rows.

        A pass over the data that has begun is read to its end.
        """
        if recipe.total_train_steps is not None:
            return recipe.total_train_steps
        size = recipe.train_dataset.batch_size
        epoch, row = place_after([*self.steps_by_size, [size, 0]], n_items)
        return self.step + (n_items - row) // size + (recipe.total_train_epochs - epoch - 1) * (n_items // size)

    def has_stopped(self, config: EarlyStoppingConfig | None) -> bool:
        """Return whether the run has ended early, and would with `config`, the recipe's present section, too."""
        best = self.best_evaluation
        if not self.stopped_early or config is None or best is None or config.metric not in (None, best.metric):
            return False
        return best.n_since >= config.patience

    def write(self, folder: Path) -> Path:
        """Write `run.json` into the checkpoint's folder. Returns its path.

        Raises:
            OSError: it cannot be written; the error names the file.
        """
        path = folder / FILE
        write_file(path, (json.dumps(asdict(self), indent=1, ensure_ascii=True) + "\n").encode())
        return path

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read `run.json` from the checkpoint's folder.

        Raises:
            DamagedCheckpointError: it is missing, or its content is not a run's state.
        """
        file = folder / FILE
        try:
            state = TypeAdapter(cls).validate_python(read_json(file))
            # What readers take for granted.
            datetime.fromisoformat(state.began)
            _size, _n = state.sampler["batches"][-1]
            return state
        except FileNotFoundError:
            raise DamagedCheckpointError(f"{file} is missing") from None
        except (ValueError, IndexError) as error:
            raise DamagedCheckpointError(f"{file} is damaged, or another version wrote it: {error!r}") from error
