"""The teacher in an update: its log-probs of the tokens that the policy has sampled."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fivefold.algorithms.distillation import LOGPROBS, at
from fivefold.config.schema.distillation import DistillConfig
from fivefold.engine.distillation import TopK
from fivefold.engine.scores import Logprobs
from fivefold.observe.timers import PhaseTimers
from fivefold.roles.frozen import FrozenModel
from fivefold.roles.remote_batch import RemoteBatch
from fivefold.update.step import Part, Prepared

DEFAULT_TOP_K = 64
"""Tokens of `actor.distill.over: top_k` if the recipe names no number."""


@dataclass(frozen=True)
class Teacher(Part):
    """Draws the policy towards a teacher."""

    model: FrozenModel
    what: Logprobs | TopK
    """The log-probs that it tells: of the sampled tokens, or of the most likely ones at each place."""
    timers: PhaseTimers

    def prepare(self, step: Prepared) -> Prepared:
        """Add the column `teacher_logprobs`, or `teacher_tokens` and `teacher_token_logprobs`."""
        with self.timers.phase("teacher"):
            return replace(step, batch=self.taught(step.batch))

    def taught_examples(self, batch: RemoteBatch) -> RemoteBatch:
        """Return an expert's sequences with the teacher's columns."""
        with self.timers.phase("taught examples"):
            return self.taught(batch)

    def taught(self, batch: RemoteBatch) -> RemoteBatch:
        """Return a batch with the teacher's columns."""
        return batch.with_pieces(self.model.score(batch, self.what))


def placed(what: Logprobs | TopK, place: int) -> Logprobs | TopK:
    """Return the same log-probs as columns of a row's teacher at `place` among its teachers, counted from 0."""
    if isinstance(what, TopK):
        return replace(what, place=place)
    return replace(what, name=at(what.name, place))


def told(config: DistillConfig, vocab: int, temperature: float) -> Logprobs | TopK:
    """Return the log-probs that a teacher tells, of `vocab` tokens at most at each place."""
    if config.over == "sampled":
        return Logprobs(temperature, LOGPROBS)
    return TopK(vocab if config.over == "full" else min(config.top_k or DEFAULT_TOP_K, vocab), temperature)
