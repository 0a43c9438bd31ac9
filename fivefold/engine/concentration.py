"""The sum of squared probabilities at each place, from the last hidden state, without the [tokens, vocabulary] logits.

As in `logprobs`, the vocabulary is sharded over tensor-parallel ranks, and the places are taken a chunk at a time.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from fivefold.engine.logprobs import LogitChunks, logits_of
from fivefold.engine.vocab_shards import gathered, own_rows


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
