"""The sequences of an update with those of an expert, and what each weighs in the loss (algorithms/imitation.py)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fivefold.algorithms.imitation import EXPERT, NLL_WEIGHT, ExpertWeight, Imitation
from fivefold.config.schema.data import ExpertDatasetConfig
from fivefold.config.schema.train import TrainRecipe
from fivefold.data.examples import Examples
from fivefold.data.sft import SFTExample, load_sft, sft_columns
from fivefold.roles.remote_batch import KEPT, Piece, RemoteBatch
from fivefold.rules.models import check_examples
from fivefold.run.setup import Groundwork
from fivefold.types import Columns

RIGHT = "is_right"
"""Name of the scalar that is 1 for completions that count as right, else 0."""


@dataclass(frozen=True)
class ExpertTerm:
    """An expert's share of the loss of one update."""

    columns: Columns
    """The expert's sequences."""
    weight: float
    """mu, the share of the loss."""
    by_sequence: bool = False
    """Whether each sequence counts alike, instead of each token."""


class ExpertExamples:
    """Draws the expert's examples of each step, and deals them out to its updates."""

    def __init__(
        self, config: ExpertDatasetConfig, examples: Examples[SFTExample], n_minibatches: int, seed: int
    ) -> None:
        """Take the data, and begin with its first examples.

        Args:
            config: weights, and the examples of a step, a multiple of `n_minibatches`.
            examples: the data.
            n_minibatches: updates in a pass over a step's samples.
            seed: seed of the order of the examples.
        """
        self._config = config
        self.usage = examples.usage
        """The number of rows used, read and too long, as a text for the user."""
        self.sampler = examples.sampler(config, seed)
        """Reads the examples; its position is behind those that were drawn."""
        self._n_minibatches = n_minibatches
        self._weight = ExpertWeight(config.weight, config.last_weight, config.warmup_steps, config.decay_steps)
        self.parts: list[Columns] = []
        """The step's examples, by update."""
        self._n_dealt = 0
        self.weight = 0.0
        """mu of the step."""

    @staticmethod
    def of(recipe: TrainRecipe, ground: Groundwork) -> ExpertExamples | None:
        """Return the examples of a recipe; None if it has none.

        Raises:
            ValueError: a data set that cannot be used, or examples longer than the model's positions.
        """
        config = recipe.expert_dataset
        if config is None:
            return None
        examples = load_sft(config, ground.tokenizer)
        check_examples(ground.shape, "expert_dataset", examples.longest, examples.largest_token)
        return ExpertExamples(config, examples, recipe.actor.ppo_n_minibatches, recipe.seed)

    @property
    def imitation(self) -> Imitation:
        """How the loss of the step's updates has the examples."""
        return Imitation(1.0 - self.weight, self._config.token_weight)

    def draw(self, step: int) -> None:
        """Draw the examples of training step `step`, counted from 1."""
        examples, n = self.sampler.next_batch(), self._n_minibatches
        self.parts = [sft_columns(examples[part::n]) for part in range(n)]
        self._n_dealt = 0
        self.weight = self._weight(step)

    def next(self) -> ExpertTerm:
        """Return the term of the next update; each pass over a step's samples has all of its examples."""
        columns = self.parts[self._n_dealt % self._n_minibatches]
        self._n_dealt += 1
        return ExpertTerm(columns, self.weight, self._config.loss_aggregation == "sequence_mean")


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
    ends = np.cumsum(expert.columns.lengths_N, dtype=np.int64)
    counts_M = np.add.reduceat(expert.columns.values["mask"].astype(np.int64), ends - expert.columns.lengths_N)
    whole = len(counts_M) * counts_M if expert.by_sequence else np.full(len(counts_M), counts_M.sum())
    weights_N = np.concatenate([weights_N, expert.weight * divisor / whole])
    return _with_experts(batch, expert.columns).with_scalars(**{NLL_WEIGHT: weights_N.astype(np.float32)})


def _with_experts(batch: RemoteBatch, columns: Columns) -> RemoteBatch:
    """Return a copy with the sequences of `columns` after the others, which the scalar `is_expert` marks.

    Their tokens are trained, and no total counts them. Their other scalars are 0.
    """
    n, m, own = len(batch), len(columns.lengths_N), RemoteBatch.of(columns)
    scalars = {name: np.concatenate([values, np.zeros(m, np.float32)]) for name, values in batch.scalars.items()}
    if KEPT in scalars:
        scalars[KEPT][n:] = 1
    scalars[EXPERT] = np.concatenate([np.zeros(n, np.float32), np.ones(m, np.float32)])
    return RemoteBatch(
        np.concatenate([batch.lengths_N, own.lengths_N]),
        np.concatenate([batch.trained_N, np.zeros(m, np.int64)]),
        (*batch.pieces, *(Piece(piece.columns, n + piece.sequences_M) for piece in own.pieces)),
        scalars,
    )
