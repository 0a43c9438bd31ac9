"""Heads turn a model's last hidden states into named predictions for a loss.

    last hidden states [N, hidden] ──head──> {"logprobs": [N], "entropy": [N]} ──engine──> whole sequences ──> loss

A policy's head predicts log-probs over the vocabulary, a critic's head one value for each token, a classifier's head
one number for each class. The engine treats them alike: it scatters their predictions back to whole sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from fivefold.engine.logprobs import linear_logprobs

Predictions = Mapping[str, torch.Tensor]
"""Tensors float32 [N], by name."""


class HeadOptions(Protocol):
    """Options that a head gets from the loss."""

    @property
    def temperature(self) -> float:
        """Temperature that divides the logits."""

    @property
    def entropy_gradient(self) -> bool:
        """Whether the entropy must carry a gradient."""


class Head(Protocol):
    """The last part of a model, after its decoder."""

    def predict(
        self, hidden_NH: torch.Tensor, weight_VH: torch.Tensor, targets_N: torch.Tensor, options: HeadOptions
    ) -> Predictions:
        """Predict N tokens.

        Args:
            hidden_NH: the hidden state before each token, the same on all tensor-parallel ranks. Its gradient must be
                this rank's part of a sum over the tensor-parallel group.
            weight_VH: this rank's rows of the output layer.
            targets_N: int64, the tokens to predict.
            options: options of the loss.
        """


@dataclass(frozen=True)
class LogprobHead:
    """A policy's head. It predicts `logprobs` of the tokens, and the `entropy` of the distributions they come from."""

    vocab: int
    """Number of tokens in the vocabulary; further rows of the output layer are filler."""
    chunk_size: int
    """Number of tokens whose logits exist at one time."""
    group: dist.ProcessGroup
    """The tensor-parallel group, over which the vocabulary is sharded."""

    def predict(
        self, hidden_NH: torch.Tensor, weight_VH: torch.Tensor, targets_N: torch.Tensor, options: HeadOptions
    ) -> Predictions:
        logprobs, entropy = linear_logprobs(
            hidden_NH,
            weight_VH,
            targets_N,
            temperature=options.temperature,
            entropy_gradient=options.entropy_gradient,
            chunk_size=self.chunk_size,
            vocab=self.vocab,
            group=self.group,
        )
        return {"logprobs": logprobs, "entropy": entropy}
