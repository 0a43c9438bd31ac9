"""The contract of training engines, whatever library the model runs on.

All processes of a model call each method together, each with the share of its data-parallel replica. Results are
global and the same on every rank, except for log-probs, which are those of the replica's share.
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
    """Splits mini-batches over replicas and micro-batches, as this engine needs it."""

    def forward_backward(self, share: Share, loss: Loss) -> dict[str, float]:
        """Accumulate the gradient of `loss` over one mini-batch. Returns its metrics, `loss` among them.

        The gradient is that of (sum of the loss over all sequences) / `loss.normalizer(totals)`, whatever the layout,
        the split into micro-batches and the packing.
        """

    def optim_step(self) -> StepResult:
        """Clip the accumulated gradient, update the weights, advance the schedule and clear the gradient."""

    def compute_logprobs(self, share: Share, *, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute log-probs of the share's trained tokens, and the entropies of their distributions.

        Returns:
            float32 [T] each, on the CPU; 0 on tokens that are not trained.
        """

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every whole weight under its Hugging Face name; all ranks must iterate to the end, in lock-step."""

    def save_hf(self, folder: str | Path, tokenizer_source: str | Path | None = None) -> None:
        """Write the model as a Hugging Face folder that transformers loads, from all ranks, which must all see it.

        The files are the same for every layout. An earlier folder is replaced when the new one is whole.

        Raises:
            OSError: on every rank, if a disk is full or one of them cannot write; an earlier folder stays as it was.
        """

    def save(self, folder: str | Path) -> None:
        """Write master weights, Adam's moments and the step count, for `load` on this layout or any other."""

    def load(self, folder: str | Path) -> None:
        """Load what `save` wrote.

        Raises:
            ValueError: the folder holds no complete training state, or that of another model.
        """

    def offload(self, what: Collection[Offloadable] = OFFLOADABLE) -> None:
        """Move parameters, gradient buffers or optimizer state, as `what` names, to host memory; gradients are lost."""

    def onload(self, what: Collection[Offloadable] = OFFLOADABLE) -> None:
        """Move what `offload` moved to host memory back to the device."""
