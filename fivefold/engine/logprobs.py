"""Log-probabilities and entropies from the last hidden state, without the [tokens, vocabulary] logits.

The vocabulary is sharded over tensor-parallel ranks and the tokens are taken a chunk at a time, in the forward and in
the backward pass. Between the two, one log-normaliser and one entropy are kept for each token; the logits are computed
again, or kept as well where there is room for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from fivefold.engine.kernels.elementwise import logit_gradient, logit_statistics
from fivefold.engine.main_grad import add_matmul, main_grad, mark_accumulated
from fivefold.engine.vocab_shards import gathered, own_rows, rows_of


@dataclass(frozen=True)
class LogitChunks:
    """How many logits exist at one time."""

    size: int
    """Tokens whose logits are computed together."""
    recompute: bool = True
    """Whether the backward pass computes the logits again; else all of them are kept for it, in float32."""

    def of(self, n_tokens: int) -> list[slice]:
        """Return the places of each chunk of `n_tokens` tokens."""
        return [slice(start, min(start + self.size, n_tokens)) for start in range(0, n_tokens, self.size)]

    def for_grad_mode(self) -> LogitChunks:
        """Return the same, which keeps nothing where no backward pass follows."""
        return self if torch.is_grad_enabled() else replace(self, recompute=True)


def linear_logprobs(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    temperature: float,
    entropy_gradient: bool,
    chunks: LogitChunks,
    vocab: int,
    group: dist.ProcessGroup,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute log p[target] and the entropy of p = softmax(hidden @ weight.T / temperature), float32 [N] each.

    Args:
        hidden_NH: the same on all ranks. Its gradient is this rank's part of a sum over the group.
        weight_VH: this rank's rows of the output layer, in rank order.
        targets_N: int64.
        temperature: divides the logits.
        entropy_gradient: whether the entropy carries a gradient.
        chunks: the logits that exist at one time.
        vocab: rows beyond it are filler and get no probability.
        group: the ranks that share the vocabulary.
    """
    logprobs_N, entropy_N, _ = linear_logprobs_with_others(
        hidden_NH,
        weight_VH,
        targets_N,
        targets_N.new_empty(len(targets_N), 0),
        temperature=temperature,
        entropy_gradient=entropy_gradient,
        chunks=chunks,
        vocab=vocab,
        group=group,
    )
    return logprobs_N, entropy_N


def linear_logprobs_with_others(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_N: torch.Tensor,
    others_NK: torch.Tensor,
    *,
    temperature: float,
    entropy_gradient: bool,
    chunks: LogitChunks,
    vocab: int,
    group: dist.ProcessGroup,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute what `linear_logprobs` does, and from the same logits log p of other tokens, float32 [N, k].

    Args:
        hidden_NH: this and what is not named is as there.
        weight_VH: as there.
        targets_N: as there.
        others_NK: int64: k tokens at each place, of which the target may be one.
    """
    return _LinearLogprobs.apply(
        hidden_NH, weight_VH, targets_N, others_NK, temperature, entropy_gradient, chunks.for_grad_mode(), vocab, group
    )


# Statistics of a shard that holds only filler, which add nothing to any sum.
_NO_ROWS = torch.tensor([-torch.inf, 0.0, 0.0, 0.0])


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        others: torch.Tensor,
        temperature: float,
        entropy_gradient: bool,
        chunks: LogitChunks,
        vocab: int,
        group: dist.ProcessGroup,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        first, real_rows = own_rows(weight, vocab, group)
        statistics = hidden.new_empty(4, hidden.shape[0], dtype=torch.float32)
        found = torch.zeros_like(others, dtype=torch.float32)
        kept = []
        for rows in chunks.of(hidden.shape[0]):
            if real_rows == 0:
                statistics[:, rows] = _NO_ROWS.to(hidden.device)[:, None]
                continue
            logits = logits_of(hidden[rows], weight[:real_rows], temperature)
            statistics[:, rows] = logit_statistics(logits, targets[rows] - first)
            if others.shape[1]:
                places, is_own = rows_of(others[rows], first, real_rows)
                found[rows] = torch.where(is_own, logits.gather(1, places), 0.0)
            if not chunks.recompute:
                kept.append(logits)
        log_normalizer, logprobs, entropy = _combine(statistics, group)
        if group.size() > 1 and found.numel() > 0:
            dist.all_reduce(found, group=group)  # each token is on one rank
        ctx.save_for_backward(hidden, weight, targets, others, log_normalizer, entropy, *kept)
        ctx.constants = (temperature, entropy_gradient, chunks, first, real_rows)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy, found - log_normalizer[:, None]

    @staticmethod
    def backward(
        ctx: Any, grad_logprob: torch.Tensor, grad_entropy: torch.Tensor | None, grad_others: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, others, log_normalizer, entropy, *kept = ctx.saved_tensors
        temperature, entropy_gradient, chunks, first, real_rows = ctx.constants
        grad_hidden = torch.zeros_like(hidden) if real_rows == 0 else torch.empty_like(hidden)
        accumulator = WeightGradient(weight, real_rows)
        # All log-probs have the same -p in their gradient. It is computed as if all were the target's; then the tokens
        # get what is theirs.
        of_others_N = grad_others.sum(1)
        for rows, logits in logits_again(kept, chunks, hidden, weight[:real_rows], temperature):
            grad_logits = logit_gradient(
                logits,
                targets[rows] - first,
                log_normalizer[rows],
                (grad_logprob[rows] + of_others_N[rows]) / temperature,
                None if grad_entropy is None or not entropy_gradient else grad_entropy[rows] / temperature,
                entropy[rows],
                torch.float32 if others.shape[1] else hidden.dtype,
            )
            if others.shape[1]:
                # One after the other: where a sum has two terms, their order would depend on the device's threads.
                for tokens, grads in ((targets[:, None], -of_others_N[:, None]), (others, grad_others)):
                    places, is_own = rows_of(tokens[rows], first, real_rows)
                    grad_logits.scatter_add_(1, places, torch.where(is_own, grads[rows] / temperature, 0.0))
                grad_logits = grad_logits.to(hidden.dtype)
            torch.mm(grad_logits, weight[:real_rows], out=grad_hidden[rows])
            accumulator.add(grad_logits, hidden[rows])
        return grad_hidden, accumulator.result(), None, None, None, None, None, None, None


def logits_of(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the logits, float32 [chunk, rows]. On CUDA a half-precision product is accumulated and left in float32."""
    if hidden.is_cuda and hidden.dtype != torch.float32:
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    else:
        logits = torch.mm(hidden, weight.t()).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def logits_again(
    kept: Sequence[torch.Tensor],
    chunks: LogitChunks,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    temperature: float,
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield the places and the logits of each chunk for a backward pass: those that were kept, or computed again."""
    for index, rows in enumerate(chunks.of(len(hidden)) if len(weight) else []):
        yield rows, kept[index] if kept else logits_of(hidden[rows], weight, temperature)


def _combine(statistics_4N: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log-normaliser, log-prob of the target and entropy, float32 [N] each, from every rank's statistics."""
    maximum_RN, sums_RN, weighted_RN, target_RN = gathered(statistics_4N, group).unbind(1)
    maximum = maximum_RN.amax(0)
    below_RN = maximum_RN - maximum
    scale_RN = below_RN.exp()
    total = (sums_RN * scale_RN).sum(0)
    # All terms are relative to the maximum, because an offset common to all logits would cost the entropy its digits.
    shifted_RN = torch.where(scale_RN > 0, scale_RN * (weighted_RN + below_RN * sums_RN), 0.0)
    entropy = total.log() - shifted_RN.sum(0) / total
    return maximum + total.log(), (target_RN.sum(0) - maximum) - total.log(), entropy


class WeightGradient:
    """Sum over chunks of grad_logits.T @ hidden in float32, in the parameter's `main_grad` if it has one.

    A frozen weight has no gradient, and nothing is summed for it.
    """

    def __init__(self, weight: torch.Tensor, real_rows: int) -> None:
        self.weight = weight
        self.real_rows = real_rows
        self.buffer = main_grad(weight)
        self.total = self.buffer
        if weight.requires_grad and self.buffer is None:
            self.total = torch.zeros_like(weight, dtype=torch.float32)

    def add(self, grad_logits: torch.Tensor, hidden: torch.Tensor) -> None:
        if self.total is not None:
            add_matmul(self.total[: self.real_rows], grad_logits.t(), hidden)

    def result(self) -> torch.Tensor | None:
        if self.total is None:
            return None
        return self.total.to(self.weight.dtype) if self.buffer is None else mark_accumulated(self.weight)
