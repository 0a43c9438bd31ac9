"""Element-wise chains as single kernels: compiled on CUDA, plain elsewhere.

Each stands where Megatron-Core would use a TransformerEngine fusion. torch.compile derives the backward kernels and
keeps only their inputs, so that what is cheap is computed again and not stored.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

Function = TypeVar("Function", bound=Callable[..., Any])


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # Token counts change with every micro-batch: one kernel for all of them.
    return torch.compile(function, dynamic=True)


def _dispatch(function: Callable[..., Any], on: torch.Tensor, *args: Any) -> Any:
    return (_compiled(function) if on.is_cuda else function)(*args)


def swiglu(gate_up_N2F: torch.Tensor, probs_N: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up * probability (Shazeer 2020), computed in float32 and rounded once. Returns [N, F]."""
    return _dispatch(_swiglu, gate_up_N2F, gate_up_N2F, probs_N)


def _swiglu(gate_up: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up * probs.float().unsqueeze(-1)).to(gate_up.dtype)


def sum_rows(rows_ND: torch.Tensor, index_TK: torch.Tensor) -> torch.Tensor:
    """Sum over k of rows[index[t, k]], accumulated in float32. Returns [T, D]."""
    return _dispatch(_sum_rows, rows_ND, rows_ND, index_TK)


def _sum_rows(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return rows[index].float().sum(1).to(rows.dtype)


def split_heads(
    qkv_TC: torch.Tensor,
    query_weight_D: torch.Tensor | None,
    key_weight_D: torch.Tensor | None,
    cos_T1D: torch.Tensor,
    sin_T1D: torch.Tensor,
    n_groups: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [T, heads, D], keys and values [T, groups, D] from their joint projection: q/k norm, then rotation.

    The projection holds, for each of `n_groups` key heads, its query heads, the key and the value.
    """
    return _dispatch(_split_heads, qkv_TC, qkv_TC, query_weight_D, key_weight_D, cos_T1D, sin_T1D, n_groups, eps)


def _split_heads(
    qkv: torch.Tensor,
    query_weight: torch.Tensor | None,
    key_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    n_groups: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    head_dim = cos.shape[-1]
    grouped = qkv.view(qkv.shape[0], n_groups, -1, head_dim)
    query = grouped[:, :, :-2].reshape(qkv.shape[0], -1, head_dim)
    key, value = grouped[:, :, -2], grouped[:, :, -1]
    if query_weight is not None:
        query = F.rms_norm(query, (head_dim,), query_weight, eps)
        key = F.rms_norm(key, (head_dim,), key_weight, eps)
    return _rotate(query, cos, sin), _rotate(key, cos, sin), value.contiguous()


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the channel pairs (i, i + D/2) (Su et al. 2021, in the half-split order of Hugging Face)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def logit_statistics(logits_NV: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    """float32 [4, N]: max l, sum e^(l - max), sum e^(l - max) l, and the target's logit, or 0 if it is not among the V."""
    return _dispatch(_logit_statistics, logits_NV, logits_NV, targets_N)


def _logit_statistics(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    maximum = logits.amax(dim=-1)
    weights = (logits - maximum[:, None]).exp()
    inside = (targets >= 0) & (targets < logits.shape[1])
    target = logits.gather(1, targets.clamp(0, logits.shape[1] - 1)[:, None]).squeeze(1)
    return torch.stack((maximum, weights.sum(-1), (weights * logits).sum(-1), torch.where(inside, target, 0.0)))


def logit_gradient(
    logits_NV: torch.Tensor,
    targets_N: torch.Tensor,
    log_normalizer_N: torch.Tensor,
    grad_logprob_N: torch.Tensor,
    grad_entropy_N: torch.Tensor | None,
    entropy_N: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`dtype` [N, V]: d/dl of g logprob + g_H H, which is g (1[target] - p) - g_H p (log p + H)."""
    return _dispatch(
        _logit_gradient, logits_NV, logits_NV, targets_N, log_normalizer_N, grad_logprob_N, grad_entropy_N, entropy_N, dtype
    )


def _logit_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    log_normalizer: torch.Tensor,
    grad_logprob: torch.Tensor,
    grad_entropy: torch.Tensor | None,
    entropy: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    log_p = logits - log_normalizer[:, None]
    p = log_p.exp()
    is_target = targets[:, None] == torch.arange(logits.shape[1], device=logits.device)
    grad = grad_logprob[:, None] * (is_target.float() - p)
    if grad_entropy is not None:
        grad = grad - grad_entropy[:, None] * p * (log_p + entropy[:, None])
    return grad.to(dtype)
