"""What a forward pass scores: columns of a batch, and the head that predicts them."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from fivefold.batch import Batch
from fivefold.engine.heads import Asked, Head, OutputLayer, Predictions
from fivefold.engine.logprobs import linear_logprobs
from fivefold.engine.sequences import MicroBatch


class Score(Asked):
    """What a pass without gradient computes of each trained token."""

    of_values: ClassVar[bool] = False
    """Whether the model must have a value head; else it must not."""
    n_appended: ClassVar[int] = 0
    """Most tokens that `lay_out` appends to a sequence."""
    records_routes: bool = False
    """Whether the experts of each token become the column `routes`, for router replay."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the first column."""

    @property
    @abstractmethod
    def n_rows(self) -> int:
        """Number of predictions that `predict` returns."""

    @abstractmethod
    def columns(self, rows_PT: torch.Tensor, mask_T: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the columns [T, ...] of a batch, by name.

        Args:
            rows_PT: float32 [P, T]: the predictions in their order; 0 on tokens that are not trained.
            mask_T: float32 [T]: the mask of the batch.
        """

    def lay_out(self, batch: Batch) -> Batch:
        """Return the sequences as the model must see them."""
        return batch


@dataclass(frozen=True)
class Logprobs(Score):
    """Log-probs of the tokens, as the column `name`, and entropies of the distributions that they come from."""

    temperature: float = 1.0
    """Temperature that divides the logits."""
    name: str = "logprobs"
    entropy_gradient: bool = False
    """Whether the entropy must carry a gradient."""
    records_routes: bool = False
    """As in `Score`."""

    n_rows = 2

    def predict(self, head: Head, hidden_NH: torch.Tensor, output: OutputLayer, micro_batch: MicroBatch) -> Predictions:
        """Predict `logprobs` and `entropy`."""
        logprobs, entropy, _ = linear_logprobs(
            hidden_NH,
            output.weight_VH,
            micro_batch.local.targets_N,
            head.vocabulary,
            temperature=self.temperature,
            entropy_gradient=self.entropy_gradient,
        )
        return {"logprobs": logprobs, "entropy": entropy}

    def columns(self, rows_PT: torch.Tensor, mask_T: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the column of log-probs, float32 [T]."""
        return {self.name: rows_PT[0]}
