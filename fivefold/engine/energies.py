"""Energies of tokens, which a baseline by token weighs (`algorithms/advantages/token_baseline.py`).

The energy of a token of probability p_t is |e_t - p|^2 = 1 - 2 p_t + sum_v p_v^2. As in `logprobs.py`, the vocabulary
is sharded over tensor-parallel ranks, and the full [tokens, vocabulary] logits never exist at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from fivefold.engine.heads import Head, Logprobs, OutputLayer, Predictions
from fivefold.engine.logprobs import LogitChunks, logits_of
from fivefold.engine.micro_batches import MicroBatch
from fivefold.engine.vocab_shards import gathered, own_rows


@dataclass(frozen=True)
class Energies(Logprobs):
    """Log-probs as the column `name`, and energies as the column `energies`, NaN on tokens that are not trained."""

    name: str = "old_logprobs"

    n_rows = Logprobs.n_rows + 1

    def predict(self, head: Head, hidden_NH: torch.Tensor, output: OutputLayer, micro_batch: MicroBatch) -> Predictions:
        """Predict `logprobs`, `entropy`, and the sums of squared probabilities as `squares`."""
        squares = linear_sum_of_squares(
            hidden_NH,
            output.weight_VH,
            temperature=self.temperature,
            chunks=head.chunks,
            vocab=head.vocab,
            group=head.group,
        )
        return {**super().predict(head, hidden_NH, output, micro_batch), "squares": squares}

    def columns(self, rows_PT: torch.Tensor, mask_T: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return both columns, float32 [T] each."""
        logprobs_T, squares_T = rows_PT[0], rows_PT[-1]
        energies_T = (1 - 2 * logprobs_T.exp() + squares_T).clamp(min=0)
        energies_T[~mask_T.bool()] = torch.nan
        return {self.name: logprobs_T, "energies": energies_T}


@torch.no_grad()
def linear_sum_of_squares(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    *,
    temperature: float,
    chunks: LogitChunks,
    vocab: int,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Return sum_v p_v^2 of p = softmax(hidden @ weight.T / temperature), float32 [N].

    Args:
        hidden_NH: the same on all ranks.
        weight_VH: this rank's rows of the output layer, in rank order.
        temperature: divides the logits.
        chunks: the logits that exist at one time.
        vocab: rows beyond it are filler and get no probability.
        group: the ranks that share the vocabulary.
    """
    _, real_rows = own_rows(weight_VH, vocab, group)
    # log sum e^l and log sum e^2l of this rank's rows.
    sums_2N = hidden_NH.new_full((2, len(hidden_NH)), -torch.inf, dtype=torch.float32)
    for rows in chunks.of(len(hidden_NH)) if real_rows else []:
        logits = logits_of(hidden_NH[rows], weight_VH[:real_rows], temperature)
        sums_2N[0, rows] = logits.logsumexp(1)
        sums_2N[1, rows] = logits.mul_(2).logsumexp(1)
    once_N, twice_N = gathered(sums_2N, group).logsumexp(0)
    return (twice_N - 2 * once_N).exp()
