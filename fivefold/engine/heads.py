"""Heads: what a model's last hidden states are turned into, as named predictions for a loss.

    last hidden states [N, hidden] ──head──> {"logprobs": [N], "entropy": [N]} ──engine──> whole sequences ──> loss

A policy ends in the vocabulary and predicts log-probs; a critic ends in one number and predicts values; a classifier
ends in one number a class. The engine knows none of them: it scatters whatever a head predicts back to whole sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from fivefold.engine.logprobs import linear_logprobs

Predictions = Mapping[str, torch.Tensor]
"""float32 [N] each, by name."""


class HeadOptions(Protocol):
    """What a head must know of the loss that reads its predictions."""

    @property
    def temperature(self) -> float:
        """The logits are divided by it."""

    @property
    def entropy_gradient(self) -> bool:
        """Whether the entropy must carry a gradient."""


class Head(Protocol):
    """The last piece of a model."""

    def predict(
        self, hidden_NH: torch.Tensor, weight_VH: torch.Tensor, targets_N: torch.Tensor, options: HeadOptions
    ) -> Predictions:
        """Predictions of N tokens.

        Args:
            hidden_NH: the hidden state before each token, the same on all tensor-parallel ranks. Its gradient is this
                rank's part, to be summed over the group.
            weight_VH: this rank's rows of the output layer.
            targets_N: int64, the tokens themselves.
            options: what the loss asks for.
        """


@dataclass(frozen=True)
class LogprobHead:
    """A vocabulary: `logprobs` of the tokens, and the `entropy` of the distributions that predict them."""

    vocab: int
    """Rows of the whole output layer that stand for tokens; what follows them is filler."""
    chunk_size: int
    """Tokens whose logits exist at one time."""
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
