"""Triton kernels over [tokens, vocabulary] logits: one read each, whatever the vocabulary's size."""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

# Takes the place of minus infinity, whose difference from itself would be NaN.
_LOWEST = tl.constexpr(-1e30)
# In float32, e^x is 0 below this, and products with it are finite.
_LEAST = tl.constexpr(-1e4)
_STATISTICS_BLOCK = 2048
_GRADIENT_BLOCK = 4096


def logit_statistics(logits_NV: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    """Return the four statistics that determine log-probs and entropies, float32 [4, N].

    They are max l, sum e^(l - max), sum e^(l - max) (l - max), and the target's logit (0 if it is not among the V).
    """
    logits = logits_NV.contiguous()
    n_rows, vocab = logits.shape
    statistics = logits.new_empty(4, n_rows, dtype=torch.float32)
    block = min(triton.next_power_of_2(vocab), _STATISTICS_BLOCK)
    _statistics_kernel[(n_rows,)](logits, targets_N.contiguous(), statistics, n_rows, vocab, BLOCK=block, num_warps=8)
    return statistics


@triton.jit(do_not_specialize=["n_rows"])
def _statistics_kernel(
    logits: tl.tensor,
    targets: tl.tensor,
    statistics: tl.tensor,
    n_rows: tl.tensor,
    vocab: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    # Each lane keeps a running maximum and two sums relative to it (online softmax, Milakov and Gimelshein 2018), so
    # that the threads meet once, at the end of the row.
    row = tl.program_id(0)
    start_of_row = logits + row.to(tl.int64) * vocab
    maximum = tl.full([BLOCK], _LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, vocab, BLOCK, num_stages=3):
        column = start + tl.arange(0, BLOCK)
        logit = tl.load(start_of_row + column, mask=column < vocab, other=_LOWEST).to(tl.float32)
        # Either the new logit or the old sums are scaled, never both, so one exponential serves both cases.
        rises = logit > maximum
        distance = tl.maximum(-tl.abs(logit - maximum), _LEAST, propagate_nan=tl.PropagateNan.ALL)
        factor = tl.exp(distance)
        # The sum of e^(l - max) (l - max) moves with the maximum: by `distance` for each unit of weight so far.
        weighted = tl.where(rises, factor * (weighted + distance * total), weighted + factor * distance)
        total = tl.where(rises, total * factor + 1.0, total + factor)
        maximum = tl.maximum(maximum, logit)
    # A lane that saw no column at all holds _LOWEST, so this factor removes what it counted.
    row_maximum = tl.max(maximum, 0)
    below = tl.maximum(maximum - row_maximum, _LEAST, propagate_nan=tl.PropagateNan.ALL)
    scale = tl.exp(below)
    weighted += below * total
    target = tl.load(targets + row)
    is_inside = (target >= 0) & (target < vocab)
    tl.store(statistics + row, row_maximum)
    tl.store(statistics + n_rows + row, tl.sum(total * scale, 0))
    tl.store(statistics + 2 * n_rows + row, tl.sum(weighted * scale, 0))
    tl.store(statistics + 3 * n_rows + row, tl.load(start_of_row + target, mask=is_inside, other=0.0).to(tl.float32))


def logit_gradient(
    logits_NV: torch.Tensor,
    targets_N: torch.Tensor,
    log_normalizer_N: torch.Tensor,
    grad_logprob_N: torch.Tensor,
    grad_entropy_N: torch.Tensor | None,
    entropy_N: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return d/dl of g logprob + g_H H, which is g (1[target] - p) - g_H p (log p + H), as `dtype` [N, V]."""
    logits = logits_NV.contiguous()
    n_rows, vocab = logits.shape
    grad = logits.new_empty(n_rows, vocab, dtype=dtype)
    block = min(triton.next_power_of_2(vocab), _GRADIENT_BLOCK)
    n_blocks = triton.cdiv(vocab, block)
    _gradient_kernel[(n_rows * n_blocks,)](
        logits,
        targets_N.contiguous(),
        log_normalizer_N.contiguous(),
        grad_logprob_N.contiguous(),
        None if grad_entropy_N is None else grad_entropy_N.contiguous(),
        entropy_N.contiguous(),
        grad,
        vocab,
        n_blocks,
        HAS_ENTROPY=grad_entropy_N is not None,
        BLOCK=block,
        num_warps=8,
    )
    return grad


@triton.jit
def _gradient_kernel(
    logits: tl.tensor,
    targets: tl.tensor,
    log_normalizers: tl.tensor,
    grad_logprobs: tl.tensor,
    grad_entropies: tl.tensor,
    entropies: tl.tensor,
    grad_logits: tl.tensor,
    vocab: tl.tensor,
    n_blocks: tl.tensor,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = (tl.program_id(0) // n_blocks).to(tl.int64)
    column = (tl.program_id(0) % n_blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    logit = tl.load(logits + row * vocab + column, mask=inside, other=0.0).to(tl.float32)
    log_p = logit - tl.load(log_normalizers + row)
    p = tl.exp(log_p)
    is_target = column == tl.load(targets + row)
    grad = tl.load(grad_logprobs + row) * (is_target.to(tl.float32) - p)
    if HAS_ENTROPY:
        grad -= tl.load(grad_entropies + row) * p * (log_p + tl.load(entropies + row))
    tl.store(grad_logits + row * vocab + column, grad.to(grad_logits.dtype.element_ty), mask=inside)
