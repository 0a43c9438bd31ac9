"""Several teachers in an update: each tells its log-probs of the rows that it teaches.

    row 0  data source "math"   teacher math                    columns of place 0
    row 1  data source "code"   teacher code                    columns of place 0
    row 2  data source "both"   teachers math and code          columns of places 0 and 1, and the weight of each

Teachers that share no prompt have the same place, and fill the same columns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fivefold.algorithms.distillation import WEIGHT, at
from fivefold.algorithms.policy_loss import PolicyLoss
from fivefold.config.schema.distillation import NamedTeacherConfig
from fivefold.config.schema.train import TrainRecipe
from fivefold.engine.distillation import TopK
from fivefold.engine.scores import Logprobs
from fivefold.observe.timers import PhaseTimers
from fivefold.roles.frozen import FrozenModel
from fivefold.roles.remote_batch import Piece, RemoteBatch
from fivefold.types import Prompt
from fivefold.update.step import Part, Prepared
from fivefold.update.teacher import placed


@dataclass(frozen=True)
class Teachers(Part):
    """Draws the policy towards several teachers."""

    models: Mapping[str, FrozenModel]
    """The models, by the teachers' names in the recipe."""
    config: Mapping[str, NamedTeacherConfig]
    """What each teaches, by the same names."""
    what: Logprobs | TopK
    """The log-probs that each tells."""
    timers: PhaseTimers

    def prepare(self, step: Prepared) -> Prepared:
        """Add the columns of each place, `teacher_weight` of each if there are several, and `teacher_rows/<name>`."""
        sources = [sample.prompt.data_source for sample in step.samples]
        with self.timers.phase("teachers"):
            taught = self.taught(step.batch, sources)
        rows = Counter(name for source in sources for name, own in self.config.items() if own.teaches(source))
        shares = {f"teacher_rows/{name}": rows[name] / len(sources) for name in self.config}
        return replace(step, batch=taught).measured(shares)

    def loss(self, loss: PolicyLoss, step: Prepared) -> PolicyLoss:
        """Let the loss weigh the teachers of each row."""
        assert loss.distillation is not None
        return replace(loss, distillation=replace(loss.distillation, n_teachers=self._n_places))

    def taught_examples(self, batch: RemoteBatch) -> RemoteBatch:
        """Return an expert's sequences with the columns of the teachers of all prompts."""
        with self.timers.phase("taught examples"):
            return self.taught(batch, [""] * len(batch))

    def taught(self, batch: RemoteBatch, sources: Sequence[str]) -> RemoteBatch:
        """Return a batch with the columns of the teachers of its rows.

        Args:
            batch: the rows.
            sources: the data source of each.
        """
        total_N = np.array([sum(own.weight for own in self.config.values() if own.teaches(s)) for s in sources])
        weights = np.zeros((self._n_places, len(batch)), np.float32)
        pieces: list[Piece] = []
        for name, place in places(self.config).items():
            own = self.config[name]
            rows = np.array([row for row, source in enumerate(sources) if own.teaches(source)], np.int64)
            if not len(rows):
                continue
            weights[place, rows] = own.weight / total_N[rows]
            for piece in self.models[name].score(batch.select(rows.tolist()), placed(self.what, place)):
                whole = np.where(piece.sequences_M >= 0, rows[piece.sequences_M], -1)
                pieces.append(Piece(piece.columns, whole))
        taught = batch.with_pieces(pieces)
        if self._n_places == 1:
            return taught
        return taught.with_scalars(**{at(WEIGHT, place): row_N for place, row_N in enumerate(weights)})

    @property
    def _n_places(self) -> int:
        return max(places(self.config).values()) + 1


def places(teachers: Mapping[str, NamedTeacherConfig]) -> dict[str, int]:
    """Return the place of each teacher: the first whose teachers share no prompt with it."""
    found: dict[str, int] = {}
    for name, own in teachers.items():
        taken = {place for other, place in found.items() if own.shares_prompts(teachers[other])}
        found[name] = next(place for place in range(len(teachers)) if place not in taken)
    return found


def check_taught(recipe: TrainRecipe, prompts: Sequence[Prompt]) -> None:
    """Refuse prompts that no teacher teaches, and teachers without a prompt.

    Raises:
        ValueError: there are some.
    """
    sources = Counter(prompt.data_source for prompt in prompts)
    teachers = recipe.teachers
    untaught = [source for source in sources if not any(own.teaches(source) for own in teachers.values())]
    if untaught:
        counts = ", ".join(f"{source!r} ({sources[source]})" for source in untaught)
        raise ValueError(
            f"no teacher teaches the prompts of data_source {counts}: name the source in teachers.<name>.data_sources, "
            "or set data_sources of one teacher to null"
        )
    for name, own in teachers.items():
        if not any(own.teaches(source) for source in sources):
            raise ValueError(
                f"teachers.{name}.data_sources={own.data_sources} names no data_source of the prompts, which are of "
                f"{', '.join(map(repr, sources))}: name one of these, or drop the teacher"
            )
