"""Flash attention on CUDA: PyTorch's kernels, or the package flash-attn-4."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F

from fivefold.config.schema.engine import FlashAttention

_GPUS_OF_4 = {9: "Hopper", 10: "Blackwell"}
"""Major compute capabilities that FlashAttention 4 has forward and backward kernels for."""


@dataclass(frozen=True)
class FlashPlan:
    """Plan for flash attention: cumulative lengths, int32 [entries + 1], on the device; and the largest lengths."""

    kernels: FlashAttention
    cu_queries: torch.Tensor
    cu_keys: torch.Tensor
    max_queries: int
    max_keys: int

    @staticmethod
    def of(kernels: FlashAttention, queries: torch.Tensor, keys: torch.Tensor, device: torch.device) -> FlashPlan:
        """Return the plan of entries with these numbers of queries and keys, int64 [entries]."""
        start = torch.zeros(1, dtype=torch.int64)
        return FlashPlan(
            kernels,
            cu_queries=torch.cat([start, queries.cumsum(0)]).to(device, torch.int32, non_blocking=True),
            cu_keys=torch.cat([start, keys.cumsum(0)]).to(device, torch.int32, non_blocking=True),
            max_queries=int(queries.max()),
            max_keys=int(keys.max()),
        )


def flash_kernels(attn_impl: FlashAttention, dtype: str, device: torch.device) -> FlashAttention | None:
    """Return the flash attention of a model of `dtype` on `device`; None: there is none for it.

    Raises:
        ValueError: the recipe asks for `flash_attention_4` where it cannot run.
    """
    if attn_impl == "flash_attention_4":
        _check_4(dtype, device)
    return attn_impl if device.type == "cuda" and dtype in ("bfloat16", "float16") else None


def _check_4(dtype: str, device: torch.device) -> None:
    advice = "or set attn_impl to flash_attention_2"
    if device.type != "cuda" or dtype != "bfloat16":
        raise ValueError(
            f"attn_impl=flash_attention_4 is for bfloat16 models on GPUs, got {dtype} on {device.type}: set dtype to "
            f"bfloat16 on GPUs, {advice}"
        )
    if find_spec("flash_attn") is None or find_spec("flash_attn.cute") is None:
        raise ValueError(
            "attn_impl=flash_attention_4 needs the package flash-attn-4, which is not installed here: pip install "
            f'"fivefold[flash-attention-4]", {advice}'
        )
    major, minor = torch.cuda.get_device_capability(device)
    if major not in _GPUS_OF_4:
        raise ValueError(
            f"attn_impl=flash_attention_4 has kernels for {' and '.join(_GPUS_OF_4.values())} GPUs, got compute "
            f"capability {major}.{minor}: use such GPUs, {advice}"
        )


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: FlashPlan,
    scale: float | None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from query [T, heads, d] to key [K, kv_heads, d] and value [K, kv_heads, v]; see `varlen_attention`."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if plan.kernels == "flash_attention_4":
        assert (window, sinks) == (None, None), "rules refuse FlashAttention 4 for such models"
        return _attend_4(query, key, value, plan, scale)
    # Queries see so many keys before the last one, -1 for all, and none after it.
    seen = (-1 if window is None else window - 1, 0)
    if sinks is None:
        return _attend_2(query, key, value, plan, scale, seen)
    output: torch.Tensor = _WithSinks.apply(query, key, value, sinks, plan, scale, seen)
    return output


def _attend_2(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: FlashPlan,
    scale: float,
    seen: tuple[int, int],
) -> torch.Tensor:
    """Attend with FlashAttention 2, which wants heads of one width: appended zeros change no score."""
    width, value_width = max(query.shape[-1], value.shape[-1]), value.shape[-1]
    output: torch.Tensor = _pytorch()(
        *(_widened(heads, width) for heads in (query, key, value)),
        plan.cu_queries,
        plan.cu_keys,
        plan.max_queries,
        plan.max_keys,
        scale=scale,
        window_size=seen,
    )
    return output[..., :value_width]


class _WithSinks(torch.autograd.Function):
    """FlashAttention 2 with a sink s in each head's softmaxes, of its output o without sinks and its log-sum-exp l.

    With the sink they are o' = o sigmoid(l - s) and l' = log(exp l + exp s). The kernels' own backward pass makes the
    gradients of queries, keys and values of these; the sink's is -sum over queries of (do . o') exp(s - l').
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor,
        plan: FlashPlan,
        scale: float,
        seen: tuple[int, int],
    ) -> torch.Tensor:
        output, lse_HT, rng_state, *_ = torch.ops.aten._flash_attention_forward(
            query,
            key,
            value,
            *_lengths(plan),
            0.0,
            seen[0] < 0,
            False,
            scale=scale,
            window_size_left=seen[0],
            window_size_right=seen[1],
        )
        sinks_H1 = sinks.float().unsqueeze(1)
        output = (output * torch.sigmoid(lse_HT - sinks_H1).t().unsqueeze(-1)).to(query.dtype)
        lse_HT = torch.logaddexp(lse_HT, sinks_H1)
        ctx.save_for_backward(query, key, value, sinks, output, lse_HT, rng_state)
        ctx.plan, ctx.scale, ctx.seen = plan, scale, seen
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, sinks, output, lse_HT, rng_state = ctx.saved_tensors
        grad = grad.contiguous()
        grads = torch.ops.aten._flash_attention_backward(
            grad,
            query,
            key,
            value,
            output,
            lse_HT,
            *_lengths(ctx.plan),
            0.0,
            ctx.seen[0] < 0,
            rng_state,
            torch.empty(0, device=query.device),
            scale=ctx.scale,
            window_size_left=ctx.seen[0],
            window_size_right=ctx.seen[1],
        )
        products_HT = (grad.float() * output.float()).sum(-1).t()
        grad_sinks = -(products_HT * torch.exp(sinks.float().unsqueeze(1) - lse_HT)).sum(1)
        return *grads, grad_sinks.to(sinks.dtype), None, None, None


def _lengths(plan: FlashPlan) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    return plan.cu_queries, plan.cu_keys, plan.max_queries, plan.max_keys


def _widened(heads: torch.Tensor, width: int) -> torch.Tensor:
    # Padding copies even where nothing is added.
    return F.pad(heads, (0, width - heads.shape[-1])) if heads.shape[-1] < width else heads


@cache
def _pytorch() -> Callable[..., Any]:
    """Return `varlen_attn`, with key heads shared among query heads."""
    # Imported here, because it imports torch.compile's packages, which take a second that only CUDA processes need.
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 lacks this argument and always shares key heads among query heads; later versions require it.
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        return partial(varlen_attn, enable_gqa=True)
    return varlen_attn


def _attend_4(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: FlashPlan, scale: float
) -> torch.Tensor:
    """Attend with FlashAttention 4; its first call for each width of heads compiles kernels for some ten seconds."""
    output: torch.Tensor = _package()(
        query,
        key,
        value,
        cu_seqlens_q=plan.cu_queries,
        cu_seqlens_k=plan.cu_keys,
        max_seqlen_q=plan.max_queries,
        max_seqlen_k=plan.max_keys,
        softmax_scale=scale,
        causal=True,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )[0]
    return output


@cache
def _package() -> Callable[..., Any]:
    """Return the function of flash-attn-4."""
    # Version 4.0.0b36 hands its compiler an object that it does not know, and that these kernels do not read.
    warnings.filterwarnings("ignore", message=r"Argument aux_data \(position \d+\) cannot be converted")
    from flash_attn.cute import flash_attn_varlen_func

    function: Callable[..., Any] = flash_attn_varlen_func
    return function
