"""An update's sequences together with an expert's, and what each weighs in the loss (algorithms/imitation.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from fivefold.algorithms.imitation import EXPERT, NLL_WEIGHT, ExpertWeight, Imitation
from fivefold.algorithms.policy_loss import PolicyLoss
from fivefold.batch import Columns, joined_cuts
from fivefold.config.schema.data import ExpertDatasetConfig
from fivefold.config.schema.train import TrainRecipe
from fivefold.data.examples import Examples
from fivefold.data.sampler import EpochSampler
from fivefold.data.sft import SFTExample, load_sft, sft_columns
from fivefold.roles.remote_batch import KEPT, Piece, RemoteBatch, Spans
from fivefold.rules.models import check_examples
from fivefold.run.setup import Groundwork
from fivefold.update.step import Part, Prepared, StepOutcome

RIGHT = "is_right"
"""Name of the scalar that is 1 for completions that count as right, else 0."""


class Teaching(Protocol):
    """What tells teachers' distributions at the tokens of an expert's responses."""

    def taught_examples(self, batch: RemoteBatch) -> RemoteBatch:
        """Return an expert's sequences with the teachers' columns."""


@dataclass(frozen=True)
class ExpertTerm:
    """An expert's share of the loss of one update."""

    batch: RemoteBatch
    """The expert's sequences."""
    weight: float
    """mu, the share of the loss."""
    by_sequence: bool = False
    """Whether each sequence counts alike, instead of each token."""


@dataclass(frozen=True)
class ExpertExamples:
    """An expert's examples, from which each step draws some."""

    config: ExpertDatasetConfig
    """Weights, and the examples of a step, a multiple of `n_minibatches`."""
    examples: Examples[SFTExample]
    sampler: EpochSampler[SFTExample]
    """Reads the examples; its position is after those that were drawn."""
    n_minibatches: int
    """Updates in a pass over a step's samples."""

    @staticmethod
    def of(
        config: ExpertDatasetConfig, examples: Examples[SFTExample], n_minibatches: int, seed: int
    ) -> ExpertExamples:
        """Return the examples, in an order that `seed` decides."""
        return ExpertExamples(config, examples, examples.sampler(config, seed), n_minibatches)

    @staticmethod
    def load(recipe: TrainRecipe, ground: Groundwork) -> ExpertExamples | None:
        """Return the examples of a recipe; None if it has none.

        Raises:
            ValueError: a data set that cannot be used, or examples longer than the model's positions.
        """
        config = recipe.expert_dataset
        if config is None:
            return None
        examples = load_sft(config, ground.tokenizer)
        check_examples(ground.shape, "expert_dataset", examples.longest, examples.largest_token)
        return ExpertExamples.of(config, examples, recipe.actor.ppo_n_minibatches, recipe.seed)

    def draw(self) -> list[Columns]:
        """Return the next step's examples, by mini-batch."""
        examples, n = self.sampler.next_batch(), self.n_minibatches
        return [sft_columns(examples[part::n]) for part in range(n)]

    def imitation(self, step: int) -> Imitation:
        """Return how the loss of training step `step`, counted from 1, has the examples."""
        return Imitation(1.0 - self.weight(step), self.config.token_weight)

    def weight(self, step: int) -> float:
        """Return mu of training step `step`, counted from 1."""
        config = self.config
        return ExpertWeight(config.weight, config.last_weight, config.warmup_steps, config.decay_steps)(step)

    def term(self, step: int, given: Sequence[RemoteBatch], number: int) -> ExpertTerm:
        """Return the expert's share of the loss of the update `number` of a step, counted from 0.

        Each pass over the step's samples has all of the examples in `given`, which were drawn for the step.
        """
        by_sequence = self.config.loss_aggregation == "sequence_mean"
        return ExpertTerm(given[number % self.n_minibatches], self.weight(step), by_sequence)


@dataclass(frozen=True)
class Imitated(Part):
    """Trains on an expert's responses, and on the policy's own right ones by their likelihood."""

    experts: ExpertExamples | None
    positive_coeff: float
    """Weight of the mean over tokens of right completions."""
    teaching: Teaching | None = None
    """What tells the distributions that an expert's responses are learned by; None: they are learned themselves."""

    def prepare(self, step: Prepared) -> Prepared:
        """Add the scalar `is_right`, if right completions weigh anything."""
        if self.positive_coeff == 0:
            return step
        is_right_N = np.array([sample.is_right for sample in step.samples], dtype=np.float32)
        return replace(step, batch=step.batch.with_scalars(**{RIGHT: is_right_N}))

    def before(self, step: Prepared, outcome: StepOutcome) -> StepOutcome:
        """Draw the step's examples; each pass over its samples has all of them."""
        if self.experts is None:
            return outcome
        given = [RemoteBatch.of(columns) for columns in self.experts.draw()]
        if self.teaching is not None:
            given = [self.teaching.taught_examples(batch) for batch in given]
        state = replace(outcome.state, expert_sampler=self.experts.sampler.state_dict())
        return replace(outcome, given=given, state=state)

    def loss(self, loss: PolicyLoss, step: Prepared) -> PolicyLoss:
        """Add the terms."""
        imitation = Imitation() if self.experts is None else self.experts.imitation(step.step)
        if self.teaching is not None and loss.divergence is not None:
            imitation = replace(imitation, teacher_coeff=loss.divergence.coeff)
        return replace(loss, imitation=imitation)

    def minibatch(
        self, batch: RemoteBatch, loss: PolicyLoss, step: Prepared, outcome: StepOutcome, number: int
    ) -> RemoteBatch:
        """Add the examples of the update, and what each sequence weighs."""
        term = None if self.experts is None else self.experts.term(step.step, outcome.given, number)
        return with_imitation(batch, loss.normalizer(batch.totals()), term, self.positive_coeff)

    def after(self, step: Prepared, outcome: StepOutcome) -> StepOutcome:
        """Measure mu."""
        if self.experts is None:
            return outcome
        return outcome.measured({"imitation_weight": self.experts.weight(step.step)})


def with_imitation(batch: RemoteBatch, divisor: float, expert: ExpertTerm | None, positive_coeff: float) -> RemoteBatch:
    """Return a mini-batch with the expert's sequences and the scalars `is_expert` and `nll_weight`.

    Args:
        batch: the samples of the mini-batch; the scalar `is_right` is read if right ones weigh anything.
        divisor: the divisor of the policy loss over `batch`.
        expert: the expert's share; None: there is none.
        positive_coeff: weight of the mean over tokens of right completions.
    """
    weights_N = np.zeros(len(batch), np.float64)
    if positive_coeff > 0:
        is_right_N = batch.scalars[RIGHT] > 0
        weights_N[is_right_N] = positive_coeff * divisor / max(1, int(batch.trained_N[is_right_N].sum()))
    if expert is None:
        return batch.with_scalars(
            **{NLL_WEIGHT: weights_N.astype(np.float32), EXPERT: np.zeros(len(batch), np.float32)}
        )
    counts_M = expert.batch.trained_N
    whole = len(counts_M) * counts_M if expert.by_sequence else np.full(len(counts_M), counts_M.sum())
    weights_N = np.concatenate([weights_N, expert.weight * divisor / whole])
    return _with_experts(batch, expert.batch).with_scalars(**{NLL_WEIGHT: weights_N.astype(np.float32)})


def _with_experts(batch: RemoteBatch, own: RemoteBatch) -> RemoteBatch:
    """Return a copy with the sequences of `own` after the others, which the scalar `is_expert` marks.

    Their tokens are trained, and no total counts them. Scalars that they lack are 0, and so are their spans.
    """
    n, m = len(batch), len(own)
    nothing_M = np.zeros(m, np.float32)
    scalars = {
        name: np.concatenate([values, own.scalars.get(name, nothing_M)]) for name, values in batch.scalars.items()
    }
    if KEPT in scalars:
        scalars[KEPT][n:] = 1
    scalars[EXPERT] = np.concatenate([np.zeros(n, np.float32), np.ones(m, np.float32)])
    return RemoteBatch(
        np.concatenate([batch.lengths_N, own.lengths_N]),
        np.concatenate([batch.trained_N, np.zeros(m, np.int64)]),
        (*batch.pieces, *(Piece(piece.columns, n + piece.sequences_M) for piece in own.pieces)),
        scalars,
        joined_cuts([(batch.lengths_N.tolist(), batch.cuts), (own.lengths_N.tolist(), own.cuts)]),
        {name: Spans((*spans.rows_N, *[()] * m), spans.dtype) for name, spans in batch.spans.items()},
    )
