"""What every training engine offers, whatever library the model runs on.

Every process of the model calls every verb together, with the share of its own data-parallel replica. What is returned
is global and the same everywhere, but for log-probs, which are those of the replica.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Literal, Protocol

import torch

from fivefold.algorithms.loss import Loss
from fivefold.engine.sharing import BatchPlanner, Share
from fivefold.types import StepResult

Offloadable = Literal["params", "grads", "optimizer"]
OFFLOADABLE: tuple[Offloadable, ...] = ("params", "grads", "optimizer")


class TrainingEngine(Protocol):
    """A model that is spread over processes; it trains if it was built with an optimizer."""

    planner: BatchPlanner
    """Shares mini-batches out as this engine wants them."""

    def forward_backward(self, share: Share, loss: Loss) -> dict[str, float]:
        """Accumulate the gradient of `loss` over one mini-batch. Returns its metrics, `loss` among them.

        The gradient is that of (sum of the loss over all sequences) / `loss.normalizer(totals)`, whatever the layout,
        the split into micro-batches and the packing.
        """

    def optim_step(self) -> StepResult:
        """Clip the accumulated gradient, update the weights, advance the schedule and forget the gradient."""

    def compute_logprobs(self, share: Share, *, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs of the share's trained tokens and the entropies of their distributions.

        Returns:
            float32 [T] each, on the CPU; 0 on tokens that are not trained.
        """

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight under its Hugging Face name, whole, on every rank, which all iterate in lock-step to the end."""

    def save_hf(self, folder: str | Path, tokenizer_source: str | Path | None = None) -> None:
        """Write the model as a Hugging Face folder that transformers loads."""

    def save(self, folder: str | Path) -> None:
        """Write master weights, moments and the place in the schedule, for `load` on this layout or any other."""

    def load(self, folder: str | Path) -> None:
        """Go on where `save` was called.

        Raises:
            ValueError: the folder holds no whole training state, or that of another model.
        """

    def offload(self, what: Collection[Offloadable] = OFFLOADABLE) -> None:
        """Move parameters, gradient buffers and optimizer state to host memory, each if named; gradients are lost."""

    def onload(self, what: Collection[Offloadable] = OFFLOADABLE) -> None:
        """Move back to the device what `offload` took away."""
