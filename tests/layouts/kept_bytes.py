"""Counts the bytes that a layer keeps for its backward pass, with stand-ins for kernels of CUDA that keep the same."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from fivefold.engine.kernels import flash as flash_attention
from fivefold.mcore.layers import PackedSequences


class Kernel(torch.autograd.Function):
    """What flash attention keeps for its backward pass: its inputs, its output, and a number for each query and head.

    The output is that of one whole sequence.
    """

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        every_key, every_value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        scores_HQK = torch.einsum("qhd,khd->hqk", query, every_key) * scale
        hidden_QK = torch.ones(scores_HQK.shape[1:], dtype=torch.bool).triu(1 + len(key) - len(query))
        weights_HQK = scores_HQK.masked_fill(hidden_QK, -torch.inf).softmax(-1)
        output = torch.einsum("hqk,khd->qhd", weights_HQK, every_value).contiguous()
        ctx.save_for_backward(query, key, value, output, output.new_empty(*output.shape[:2], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *(torch.zeros_like(tensor) for tensor in ctx.saved_tensors[:3]), None


class Norm(torch.autograd.Function):
    """What the fused norm of CUDA keeps for its backward pass: its input, besides a number for each token."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def norm(x: torch.Tensor, *_: Any, **_options: Any) -> torch.Tensor:
    output: torch.Tensor = Norm.apply(x)
    return output


def flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **options: Any) -> torch.Tensor:
    assert query.shape[-1] == key.shape[-1] == value.shape[-1], "flash attention wants heads of one width"
    output: torch.Tensor = Kernel.apply(query, key, value, options.get("scale") or query.shape[-1] ** -0.5)
    return output


class WithSinks:
    """What attention with sinks keeps for its backward pass: the same, for its output has been scaled in place."""

    @staticmethod
    def apply(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _sinks: torch.Tensor, _plan: Any, scale: float,
        _seen: tuple[int, int],
    ) -> torch.Tensor:  # fmt: skip
        return flash(query, key, value, scale=scale)


def kept_bytes(module: nn.Module, hidden: torch.Tensor, packed: PackedSequences) -> int:
    """Return the bytes that a module keeps of a call, besides its input, its weights and what all layers share."""
    places = packed.attention.first_keys_K, packed.attention.second_keys_K
    known = [hidden, packed.cos_T1D, packed.sin_T1D, *module.parameters(), *places]
    ignored = {tensor.untyped_storage().data_ptr() for tensor in known if tensor is not None}
    storages: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    kernels = (
        patch.object(flash_attention, "_pytorch", lambda: flash),
        patch.object(flash_attention, "_WithSinks", WithSinks),
        patch.object(torch.nn.functional, "rms_norm", norm),
    )
    with kernels[0], kernels[1], kernels[2], torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        module(hidden, packed_seq_params=packed)
    return sum(storage.nbytes() for place, storage in storages.items() if place not in ignored)
