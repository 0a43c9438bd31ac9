"""The most likely tokens at each place, from the last hidden state, without the [tokens, vocabulary] logits.

As in `logprobs`, the vocabulary is sharded over tensor-parallel ranks, and the places are taken a chunk at a time.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from fivefold.engine.logprobs import LogitChunks, logits_of
from fivefold.engine.vocab_shards import gathered, own_rows


@torch.no_grad()
def linear_top_k(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    k: int,
    *,
    temperature: float,
    chunks: LogitChunks,
    vocab: int,
    group: dist.ProcessGroup,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k most likely tokens of softmax(hidden @ weight.T / temperature), most likely first.

    Args:
        hidden_NH: the same on all ranks.
        weight_VH: this rank's rows of the output layer, in rank order.
        k: number of tokens, at most `vocab`.
        temperature: divides the logits.
        chunks: the logits that exist at one time.
        vocab: rows beyond it are filler and get no probability.
        group: the ranks that share the vocabulary.

    Returns:
        The tokens, int64 [N, k], and their log-probs, float32 [N, k].
    """
    first, real_rows = own_rows(weight_VH, vocab, group)
    tokens_NK = torch.zeros(len(hidden_NH), k, dtype=torch.int64, device=hidden_NH.device)
    logits_NK = hidden_NH.new_full((len(hidden_NH), k), -torch.inf, dtype=torch.float32)
    sums_N = hidden_NH.new_full((len(hidden_NH),), -torch.inf, dtype=torch.float32)
    for rows in chunks.of(len(hidden_NH)) if real_rows else []:
        logits = logits_of(hidden_NH[rows], weight_VH[:real_rows], temperature)
        own = min(k, real_rows)
        logits_NK[rows, :own], tokens_NK[rows, :own] = logits.topk(own)
        sums_N[rows] = logits.logsumexp(1)
    every_token, every_logit = gathered(tokens_NK + first, group), gathered(logits_NK, group)
    best_NK, places_NK = torch.cat(list(every_logit), 1).topk(k)
    tokens_NK = torch.cat(list(every_token), 1).gather(1, places_NK)
    return tokens_NK, best_NK - gathered(sums_N, group).logsumexp(0)[:, None]
