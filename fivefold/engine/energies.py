"""Energies of tokens, which a baseline by token weighs (`algorithms/advantages/token_baseline.py`).

The energy of a token of probability p_t is |e_t - p|^2 = 1 - 2 p_t + sum_v p_v^2. As in `logprobs.py`, the vocabulary
is sharded over tensor-parallel ranks, and the full [tokens, vocabulary] logits never exist at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fivefold.engine.heads import Head, OutputLayer, Predictions
from fivefold.engine.logprobs import Vocabulary, logits_of
from fivefold.engine.scores import Logprobs
from fivefold.engine.sequences import MicroBatch


@dataclass(frozen=True)
class Energies(Logprobs):
    """Log-probs as the column `name`, and energies as the column `energies`, NaN on tokens that are not trained."""

    name: str = "old_logprobs"

    n_rows = Logprobs.n_rows + 1

    def predict(self, head: Head, hidden_NH: torch.Tensor, output: OutputLayer, micro_batch: MicroBatch) -> Predictions:
        """Predict `logprobs`, `entropy`, and the sums of squared probabilities as `squares`."""
        squares = linear_sum_of_squares(hidden_NH, output.weight_VH, head.vocabulary, self.temperature)
        return {**super().predict(head, hidden_NH, output, micro_batch), "squares": squares}

    def columns(self, rows_PT: torch.Tensor, mask_T: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return both columns, float32 [T] each."""
        logprobs_T, squares_T = rows_PT[0], rows_PT[-1]
        energies_T = (1 - 2 * logprobs_T.exp() + squares_T).clamp(min=0)
        energies_T[~mask_T.bool()] = torch.nan
        return {self.name: logprobs_T, "energies": energies_T}


@torch.no_grad()
def linear_sum_of_squares(
    hidden_NH: torch.Tensor, weight_VH: torch.Tensor, vocabulary: Vocabulary, temperature: float
) -> torch.Tensor:
    """Return sum_v p_v^2 of p = softmax(hidden @ weight.T / temperature), float32 [N], without gradient.

    Args:
        hidden_NH: the same on all ranks.
        weight_VH: this rank's rows of the output layer.
        vocabulary: how the rows are sharded.
        temperature: divides the logits.
    """
    _, real_rows = vocabulary.own_rows(weight_VH)
    # log sum e^l and log sum e^2l of this rank's rows.
    sums_2N = hidden_NH.new_full((2, len(hidden_NH)), -torch.inf, dtype=torch.float32)
    for rows in vocabulary.chunks(len(hidden_NH)) if real_rows else []:
        logits = logits_of(hidden_NH[rows], weight_VH[:real_rows], temperature)
        sums_2N[0, rows] = logits.logsumexp(1)
        sums_2N[1, rows] = logits.mul_(2).logsumexp(1)
    once_N, twice_N = vocabulary.gathered(sums_2N).logsumexp(0)
    return (twice_N - 2 * once_N).exp()
