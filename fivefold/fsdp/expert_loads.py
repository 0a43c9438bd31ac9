"""Counts the tokens that each expert gets in the forward passes of a mini-batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class ExpertLoads:
    """The loads of all experts of a decoder of transformers on this rank.

    Args:
        layers: the decoder's layers; some may have experts.
        n_experts: experts of a layer; 0 for a dense model, where nothing is counted.
        device: the device of the model.
    """

    def __init__(self, layers: nn.ModuleList, n_experts: int, device: torch.device) -> None:
        self._load_LE = torch.zeros(len(layers), n_experts, device=device)
        self._real_T: torch.Tensor | None = None
        for number, layer in enumerate(layers):
            if (experts := getattr(layer.mlp, "experts", None)) is not None:
                experts.register_forward_pre_hook(partial(self._count, number))

    def start_mini_batch(self) -> None:
        """Restart the count."""
        self._load_LE.zero_()

    @contextmanager
    def counting(self, padding_T: torch.Tensor) -> Iterator[None]:
        """Count the tokens that are routed inside the block, but for those that are true in `padding_T`.

        Layers that are computed again in the backward pass are outside of it, and so are not counted twice.
        """
        self._real_T = ~padding_T
        yield
        self._real_T = None

    def total(self, group: dist.ProcessGroup) -> torch.Tensor:
        """Return the loads over all ranks that have different tokens, [layers, experts]."""
        total_LE = self._load_LE.clone()
        dist.all_reduce(total_LE, group=group)
        return total_LE

    def _count(self, layer: int, _module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._real_T is not None:
            _, chosen_TK, _ = args
            chosen = chosen_TK[self._real_T].flatten()
            self._load_LE[layer].index_add_(0, chosen, torch.ones_like(chosen, dtype=torch.float32))
