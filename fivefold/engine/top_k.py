"""Log-probs of several tokens at each place, from the last hidden state, without the [tokens, vocabulary] logits.

As in `logprobs`, the vocabulary is sharded over tensor-parallel ranks, and the places are taken a chunk at a time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fivefold.engine.logprobs import LogitChunks, WeightGradient, logits_again, logits_of


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


def linear_logprobs_of(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    tokens_NK: torch.Tensor,
    *,
    temperature: float,
    chunks: LogitChunks,
    vocab: int,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Compute log softmax(hidden @ weight.T / temperature) of k tokens at each place, float32 [N, k], with gradient.

    Args:
        hidden_NH: the same on all ranks. Its gradient is this rank's part of a sum over the group.
        weight_VH: this rank's rows of the output layer, in rank order.
        tokens_NK: int64: the tokens, no token twice at one place.
        temperature: divides the logits.
        chunks: the logits that exist at one time.
        vocab: rows beyond it are filler and get no probability.
        group: the ranks that share the vocabulary.
    """
    return _LinearLogprobsOf.apply(hidden_NH, weight_VH, tokens_NK, temperature, chunks.for_grad_mode(), vocab, group)


class _LinearLogprobsOf(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        tokens: torch.Tensor,
        temperature: float,
        chunks: LogitChunks,
        vocab: int,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        first, real_rows = own_rows(weight, vocab, group)
        found = hidden.new_zeros(tokens.shape, dtype=torch.float32)
        sums = hidden.new_full((len(hidden),), -torch.inf, dtype=torch.float32)
        kept = []
        for rows in chunks.of(len(hidden)) if real_rows else []:
            logits = logits_of(hidden[rows], weight[:real_rows], temperature)
            own, is_own = _own(tokens[rows], first, real_rows)
            found[rows] = torch.where(is_own, logits.gather(1, own), 0.0)
            sums[rows] = logits.logsumexp(1)
            if not chunks.recompute:
                kept.append(logits)
        if group.size() > 1 and found.numel() > 0:
            dist.all_reduce(found, group=group)  # each token is on one rank
        log_normalizer = gathered(sums, group).logsumexp(0)
        ctx.save_for_backward(hidden, weight, tokens, log_normalizer, *kept)
        ctx.constants = (temperature, chunks, first, real_rows)
        return found - log_normalizer[:, None]

    @staticmethod
    def backward(ctx: Any, grad_logprobs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, tokens, log_normalizer, *kept = ctx.saved_tensors
        temperature, chunks, first, real_rows = ctx.constants
        grad_hidden = torch.zeros_like(hidden)
        accumulator = WeightGradient(weight, real_rows)
        for rows, logits in logits_again(kept, chunks, hidden, weight[:real_rows], temperature):
            # d logprob[j] / d logit[v] is (v == j) - p[v].
            grad = grad_logprobs[rows] / temperature
            grad_logits = (logits - log_normalizer[rows, None]).exp() * -grad.sum(1, keepdim=True)
            own, is_own = _own(tokens[rows], first, real_rows)
            grad_logits.scatter_add_(1, own, torch.where(is_own, grad, 0.0))
            grad_logits = grad_logits.to(hidden.dtype)
            grad_hidden[rows] = torch.mm(grad_logits, weight[:real_rows])
            accumulator.add(grad_logits, hidden[rows])
        return grad_hidden, accumulator.result(), None, None, None, None, None


def own_rows(weight: torch.Tensor, vocab: int, group: dist.ProcessGroup) -> tuple[int, int]:
    """Return the first token of this rank's rows, and the number of rows that are no filler."""
    first = group.rank() * weight.shape[0]
    return first, min(max(vocab - first, 0), weight.shape[0])


def _own(tokens: torch.Tensor, first: int, real_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row of each token, any row for those of other ranks, and which tokens are this rank's."""
    rows = tokens - first
    return rows.clamp(0, real_rows - 1), (rows >= 0) & (rows < real_rows)


def gathered(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the tensors of all ranks, stacked in their order."""
    if group.size() == 1 or tensor.numel() == 0:
        return tensor.unsqueeze(0).expand(group.size(), *tensor.shape)
    stacked = tensor.new_empty(group.size() * tensor.shape[0], *tensor.shape[1:])
    dist.all_gather_into_tensor(stacked, tensor.contiguous(), group=group)
    return stacked.view(group.size(), *tensor.shape)
