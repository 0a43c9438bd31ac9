"""Element-wise chains, each as one pass over memory on CUDA and in plain PyTorch elsewhere.

Each replaces a TransformerEngine fusion in Megatron-Core. The plain functions define what is computed; the Triton
kernels must agree with them, and keep only their inputs for the backward pass.
"""

from __future__ import annotations

import importlib.util

import torch
import torch.nn.functional as F

from fivefold.families.rope_scaling import RopeScaling

# PyTorch's CUDA builds for Linux depend on Triton; its CPU builds do not.
HAS_TRITON = importlib.util.find_spec("triton") is not None
if HAS_TRITON:
    from fivefold.engine.kernels import triton_experts, triton_heads, triton_logits


def _on_triton(x: torch.Tensor) -> bool:
    return HAS_TRITON and x.is_cuda


def swiglu(gate_up_N2F: torch.Tensor, probs_N: torch.Tensor) -> torch.Tensor:
    """Compute silu(gate) * up * probability (Shazeer 2020) in float32, rounded once. Returns [N, F]."""
    if _on_triton(gate_up_N2F):
        return triton_experts.swiglu(gate_up_N2F, probs_N)
    gate, up = gate_up_N2F.float().chunk(2, dim=-1)
    return (F.silu(gate) * up * probs_N.float().unsqueeze(-1)).to(gate_up_N2F.dtype)


_GELU_FACTOR = 1.702
"""Factor in sigmoid(x), with which x sigmoid(x) is close to GELU."""


def clamped_swiglu(gate_up_N2F: torch.Tensor, probs_N: torch.Tensor, limit: float) -> torch.Tensor:
    """Compute (up + 1) * g * sigmoid(1.702 g) * probability in float32, rounded once. Returns [N, F].

    Gate and up alternate. g is the gate, at most `limit`, and ups are clamped to -limit .. limit, as in GPT-OSS.
    """
    if _on_triton(gate_up_N2F):
        return triton_experts.clamped_swiglu(gate_up_N2F, probs_N, limit, _GELU_FACTOR)
    gate, up = (gate_up_N2F[:, start::2].float() for start in (0, 1))
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    activated = (up + 1) * gate * torch.sigmoid(_GELU_FACTOR * gate)
    return (activated * probs_N.float().unsqueeze(-1)).to(gate_up_N2F.dtype)


def sum_rows(rows_ND: torch.Tensor, index_TK: torch.Tensor) -> torch.Tensor:
    """Sum rows[index[t, k]] over k in float32; -1 is no row. Returns [T, D]; on CUDA it has no gradient."""
    if _on_triton(rows_ND):
        return triton_experts.sum_rows(rows_ND, index_TK)
    with_zero = torch.cat((rows_ND, rows_ND.new_zeros(1, rows_ND.shape[1])))
    return with_zero[index_TK].float().sum(1).to(rows_ND.dtype)


def split_heads(
    qkv_TC: torch.Tensor,
    query_weight_D: torch.Tensor | None,
    key_weight_D: torch.Tensor | None,
    cos_T1D: torch.Tensor,
    sin_T1D: torch.Tensor,
    n_groups: int,
    eps: float,
    head_dim: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split the joint projection into queries [T, heads, D], keys and values [T, groups, D]; normalise and rotate q, k.

    D is `head_dim`. Its first channels are rotated, as many as `cos_T1D` and `sin_T1D` have.

    The projection holds, for each of `n_groups` key heads, its query heads, the key and the value. In half precision
    the plain version rounds after the norm and after each product, as Hugging Face does; on CUDA all of it is computed
    in float32 and rounded once.
    """
    # The kernel takes weights of the projection's dtype alone.
    has_same_dtype = query_weight_D is None or query_weight_D.dtype == qkv_TC.dtype
    if _on_triton(qkv_TC) and cos_T1D.shape[-1] == head_dim and has_same_dtype:
        return triton_heads.split_heads(qkv_TC, query_weight_D, key_weight_D, cos_T1D, sin_T1D, n_groups, eps)
    n_tokens = qkv_TC.shape[0]
    grouped = qkv_TC.view(n_tokens, n_groups, -1, head_dim)
    query = grouped[:, :, :-2].reshape(n_tokens, -1, head_dim)
    key, value = grouped[:, :, -2], grouped[:, :, -1]
    if query_weight_D is not None and key_weight_D is not None:
        query, key = rms_norm(query, query_weight_D, eps), rms_norm(key, key_weight_D, eps)
    return rotate_halves(query, cos_T1D, sin_T1D), rotate_halves(key, cos_T1D, sin_T1D), value.contiguous()


def rms_norm(x: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / rms(x) * weight [..., D] (Zhang and Sennrich 2019), in float32 and rounded once if the weight is."""
    if weight_D.dtype == x.dtype:
        return F.rms_norm(x, weight_D.shape, weight_D, eps)
    return F.rms_norm(x.float(), weight_D.shape, weight_D, eps).to(x.dtype)


def cos_sin(
    positions_T: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype, scaling: RopeScaling | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin, `dtype` [T, 1, rotated channels] each, at the positions int64 [T], or [T, rotated / 2]."""
    angles = (positions_T[:, None] if positions_T.dim() == 1 else positions_T).float() * frequencies[None, :]
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
    magnitude = 1.0 if scaling is None else scaling.magnitude
    return (angles.cos() * magnitude).to(dtype), (angles.sin() * magnitude).to(dtype)


def rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (i, i + R/2) of the first R channels (Su et al. 2021, in Hugging Face's half-split order)."""
    width = cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    first, second = turned.chunk(2, dim=-1)
    rotated = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((rotated, rest), dim=-1) if width < x.shape[-1] else rotated


def rotate_neighbours(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (2i, 2i + 1) of all channels, and put the first of each pair before the second of all.

    The products of queries and keys do not depend on the order of the channels.
    """
    cos, sin = (table[..., : x.shape[-1] // 2] for table in (cos, sin))
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def logit_statistics(logits_NV: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    """Return the four statistics that determine log-probs and entropies, float32 [4, N].

    They are max l, sum e^(l - max), sum e^(l - max) (l - max), and the target's logit (0 if it is not among the V).
    """
    if _on_triton(logits_NV):
        return triton_logits.logit_statistics(logits_NV, targets_N)
    logits = logits_NV.float()
    maximum = logits.amax(dim=-1)
    below = logits - maximum[:, None]
    weights = below.exp()
    # The weight of -inf is 0, and 0 * -inf would be NaN.
    weighted = torch.where(weights > 0, weights * below, 0.0)
    inside = (targets_N >= 0) & (targets_N < logits.shape[1])
    target = logits.gather(1, targets_N.clamp(0, logits.shape[1] - 1)[:, None]).squeeze(1)
    return torch.stack((maximum, weights.sum(-1), weighted.sum(-1), torch.where(inside, target, 0.0)))


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
    if _on_triton(logits_NV):
        return triton_logits.logit_gradient(
            logits_NV, targets_N, log_normalizer_N, grad_logprob_N, grad_entropy_N, entropy_N, dtype
        )
    log_p = logits_NV.float() - log_normalizer_N[:, None]
    p = log_p.exp()
    is_target = targets_N[:, None] == torch.arange(logits_NV.shape[1], device=logits_NV.device)
    grad = grad_logprob_N[:, None] * (is_target.float() - p)
    if grad_entropy_N is not None:
        grad = grad - grad_entropy_N[:, None] * p * (log_p + entropy_N[:, None])
    return grad.to(dtype)
