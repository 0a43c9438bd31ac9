"""Log-probabilities and entropies from the last hidden state, without the [tokens, vocabulary] logits.

The vocabulary is sharded over tensor-parallel ranks, and the tokens are taken a chunk at a time in both passes. Between
the passes, each token keeps one log-normaliser and one entropy. The logits are computed again, or kept as well where
there is room for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fivefold.engine.kernels.elementwise import logit_gradient, logit_statistics
from fivefold.engine.kernels.matmul import add_matmul, main_grad, mark_accumulated


@dataclass(frozen=True)
class Vocabulary:
    """An output layer's rows, sharded over tensor-parallel ranks in rank order, and how its logits are computed."""

    size: int
    """Number of tokens; further rows are filler, which makes them a multiple of the ranks, and get no probability."""
    group: dist.ProcessGroup
    """The tensor-parallel group."""
    chunk_size: int
    """Tokens whose logits exist at one time."""
    recompute: bool = True
    """Whether the backward pass computes the logits again; else all of them are kept for it, in float32."""

    def own_rows(self, weight_VH: torch.Tensor) -> tuple[int, int]:
        """Return the first token of this rank's rows, and the number of its rows that are not filler."""
        first = self.group.rank() * weight_VH.shape[0]
        return first, min(max(self.size - first, 0), weight_VH.shape[0])

    def chunks(self, n_tokens: int) -> list[slice]:
        """Return the places of each chunk of `n_tokens` tokens."""
        return [slice(start, min(start + self.chunk_size, n_tokens)) for start in range(0, n_tokens, self.chunk_size)]

    def gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, stacked in rank order."""
        n = self.group.size()
        if n == 1 or tensor.numel() == 0:
            return tensor.unsqueeze(0).expand(n, *tensor.shape)
        stacked = tensor.new_empty(n * tensor.shape[0], *tensor.shape[1:])
        dist.all_gather_into_tensor(stacked, tensor.contiguous(), group=self.group)
        return stacked.view(n, *tensor.shape)


def linear_logprobs(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_N: torch.Tensor,
    vocabulary: Vocabulary,
    *,
    temperature: float,
    entropy_gradient: bool,
    others_NK: torch.Tensor | None = None,
    n_lists: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute log p[target] and the entropy of p = softmax(hidden @ weight.T / temperature), float32 [N] each.

    Args:
        hidden_NH: the same on all ranks. Its gradient is this rank's part of a sum over the group.
        weight_VH: this rank's rows of the output layer.
        targets_N: int64.
        vocabulary: how the rows are sharded.
        temperature: divides the logits.
        entropy_gradient: whether the entropy carries a gradient.
        others_NK: int64: k more tokens for each place, which may include the target; None: there are none.
        n_lists: lists of equal length that they are; a token is in no list twice.

    Returns:
        Both, and from the same logits log p of the other tokens, float32 [N, k].
    """
    others_NK = targets_N.new_empty(len(targets_N), 0) if others_NK is None else others_NK
    keeps = torch.is_grad_enabled() and not vocabulary.recompute
    return _LinearLogprobs.apply(
        hidden_NH, weight_VH, targets_N, others_NK, n_lists, vocabulary, temperature, entropy_gradient, keeps
    )


# Statistics of a shard of filler alone, which add nothing to any sum.
_NO_ROWS = torch.tensor([-torch.inf, 0.0, 0.0, 0.0])


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        others: torch.Tensor,
        n_lists: int,
        vocabulary: Vocabulary,
        temperature: float,
        entropy_gradient: bool,
        keeps: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        first, real_rows = vocabulary.own_rows(weight)
        statistics = hidden.new_empty(4, hidden.shape[0], dtype=torch.float32)
        found = torch.zeros_like(others, dtype=torch.float32)
        kept = []
        for rows in vocabulary.chunks(hidden.shape[0]):
            if real_rows == 0:
                statistics[:, rows] = _NO_ROWS.to(hidden.device)[:, None]
                continue
            logits = logits_of(hidden[rows], weight[:real_rows], temperature)
            statistics[:, rows] = logit_statistics(logits, targets[rows] - first)
            if others.shape[1]:
                places, is_own = _rows_of(others[rows], first, real_rows)
                found[rows] = torch.where(is_own, logits.gather(1, places), 0.0)
            if keeps:
                kept.append(logits)
        log_normalizer, logprobs, entropy = _combine(vocabulary.gathered(statistics))
        if vocabulary.group.size() > 1 and found.numel() > 0:
            dist.all_reduce(found, group=vocabulary.group)  # each token is on one rank
        ctx.save_for_backward(hidden, weight, targets, others, log_normalizer, entropy, *kept)
        ctx.constants = (vocabulary.chunks(hidden.shape[0]), temperature, entropy_gradient, first, real_rows)
        ctx.n_lists = n_lists
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy, found - log_normalizer[:, None]

    @staticmethod
    def backward(
        ctx: Any, grad_logprob: torch.Tensor, grad_entropy: torch.Tensor | None, grad_others: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, others, log_normalizer, entropy, *kept = ctx.saved_tensors
        chunks, temperature, entropy_gradient, first, real_rows = ctx.constants
        grad_hidden = torch.zeros_like(hidden) if real_rows == 0 else torch.empty_like(hidden)
        accumulator = WeightGradient(weight)
        # All log-probs have the same -p in their gradient. It is computed as if all were the target's; then each token
        # gets its own part.
        of_others_N = grad_others.sum(1)
        parts = [(targets[:, None], -of_others_N[:, None])]
        parts += zip(others.chunk(ctx.n_lists, 1), grad_others.chunk(ctx.n_lists, 1), strict=True)
        for rows, logits in _logits_again(kept, chunks, hidden, weight[:real_rows], temperature):
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
                for tokens, grads in parts:
                    places, is_own = _rows_of(tokens[rows], first, real_rows)
                    grad_logits.scatter_add_(1, places, torch.where(is_own, grads[rows] / temperature, 0.0))
                grad_logits = grad_logits.to(hidden.dtype)
            torch.mm(grad_logits, weight[:real_rows], out=grad_hidden[rows])
            accumulator.add(grad_logits, hidden[rows])
        return grad_hidden, accumulator.result(), *([None] * 7)


def logits_of(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the logits, float32 [chunk, rows]. On CUDA a half-precision product is accumulated and left in float32."""
    if hidden.is_cuda and hidden.dtype != torch.float32:
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    else:
        logits = torch.mm(hidden, weight.t()).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def _logits_again(
    kept: Sequence[torch.Tensor], chunks: list[slice], hidden: torch.Tensor, weight: torch.Tensor, temperature: float
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield the places and the logits of each chunk for a backward pass, as they were kept or computed again."""
    for index, rows in enumerate(chunks if len(weight) else []):
        yield rows, kept[index] if kept else logits_of(hidden[rows], weight, temperature)


def _rows_of(tokens: torch.Tensor, first: int, real_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row of each token, any row for another rank's token, and which tokens are this rank's."""
    rows = tokens - first
    return rows.clamp(0, real_rows - 1), (rows >= 0) & (rows < real_rows)


def _combine(statistics_R4N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log-normaliser, log-prob of the target and entropy, float32 [N] each, from every rank's statistics."""
    maximum_RN, sums_RN, weighted_RN, target_RN = statistics_R4N.unbind(1)
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

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.buffer = main_grad(weight)
        self.total = self.buffer
        if weight.requires_grad and self.buffer is None:
            self.total = torch.zeros_like(weight, dtype=torch.float32)

    def add(self, grad_logits: torch.Tensor, hidden: torch.Tensor) -> None:
        if self.total is not None:
            add_matmul(self.total, grad_logits.t(), hidden)

    def result(self) -> torch.Tensor | None:
        if self.total is None:
            return None
        return self.total.to(self.weight.dtype) if self.buffer is None else mark_accumulated(self.weight)
