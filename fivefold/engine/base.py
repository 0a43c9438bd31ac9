"""What training engines share, whatever library the model runs on: their verbs, and what a pass makes of predictions.

    predictions of this rank's tokens ─> whole sequences ─> apply_loss: a scalar to differentiate, and metrics
                                                         ─> keep_predictions: rows of a share, for a score's columns

An engine computes predictions in its own way (`_score`, `forward_backward`) and has its own weights.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist

from fivefold.algorithms.loss import Loss, LossInputs
from fivefold.algorithms.metrics import Metric, Metrics
from fivefold.engine.adapters import Switch
from fivefold.engine.context_parallel import SumOverGroup
from fivefold.engine.contract import OFFLOADABLE, Offloadable, StepResult
from fivefold.engine.distillation import Divergence
from fivefold.engine.heads import Asked, Head, Predictions
from fivefold.engine.packing import Share
from fivefold.engine.saving import SavingVerbs, no_optimizer
from fivefold.engine.scores import Logprobs, Score
from fivefold.engine.sequences import MicroBatch
from fivefold.engine.values import Values
from fivefold.types import ROUTES

COMPUTING = "computing"
"""What progress calls the passes over micro-batches."""

LossStep = Callable[[MicroBatch, dict[str, torch.Tensor]], tuple[torch.Tensor, Any]]
"""(micro-batch, predictions [T] by name) -> (scalar to differentiate, what is kept of the micro-batch)."""

Kept = tuple[torch.Tensor, torch.Tensor]
"""Rows of the share's batch, int64 [T], and their predictions, float32 [P, T]."""


class Stepping(Protocol):
    """An optimizer of a whole model."""

    def step(self) -> StepResult:
        """Clip the accumulated gradient, update the weights, advance the schedule and clear the gradient."""


AnOptimizer = TypeVar("AnOptimizer", bound=Stepping)


class EngineBase(SavingVerbs, Generic[AnOptimizer]):
    """The base of training engines, which set these attributes when they build their model."""

    head: Head
    optimizer: AnOptimizer | None
    """None: the model is not trained."""
    _away: set[Offloadable]
    """What is offloaded."""
    adapters: Switch | None
    """Switches the low-rank adapters of the layers; None: there are none."""

    @abstractmethod
    def _score(self, share: Share, what: Score) -> torch.Tensor:
        """Return the predictions of a score without gradient, float32 [P, T], on the CPU."""

    @abstractmethod
    def _recorded(self, share: Share) -> torch.Tensor:
        """Return the experts that the last score sent each token to, int8 or int16 [T, MoE layers, top_k], on the CPU.

        The engine must have been built to replay routes.
        """

    def score(self, share: Share, what: Score) -> dict[str, torch.Tensor]:
        """Compute a score of the share's trained tokens; see `TrainingEngine.score`."""
        if what.of_values != self.head.is_value:
            raise ValueError(
                f"this model's head predicts {self.head.predicts}, and {what.name} were asked for: "
                "a model that is built with value_head=True predicts values, any other log-probs"
            )
        columns = what.columns(self._score(share, what), share.batch.mask_T)
        return {**columns, ROUTES: self._recorded(share)} if what.records_routes else columns

    def without_adapters(self) -> AbstractContextManager[None]:
        """Compute the model without its adapters inside the block; see `TrainingEngine.without_adapters`."""
        assert self.adapters is not None, "this model has no adapters"
        return self.adapters.off()

    def _dropping(self) -> AbstractContextManager[None]:
        """Let adapters drop inputs inside the block, which computes gradients, as far as the recipe says."""
        return nullcontext() if self.adapters is None else self.adapters.training()

    def optim_step(self) -> StepResult:
        """Clip the accumulated gradient, update the weights, advance the schedule and clear the gradient."""
        self._require(*OFFLOADABLE)
        return self._trained("train").step()

    def _require(self, *what: Offloadable) -> None:
        if missing := [kind for kind in what if kind in self._away]:
            raise ValueError(f"{', '.join(missing)} of this engine were offloaded: call onload({missing}) first")

    def _trained(self, verb: str) -> AnOptimizer:
        if self.optimizer is None:
            raise no_optimizer(verb)
        return self.optimizer


def asked_by(loss: Loss, head: Head) -> Asked:
    """Return what a loss asks of the head.

    Raises:
        ValueError: the divergence from a teacher's distributions, of a value head.
    """
    if loss.divergence is not None:
        if head.is_value:
            raise ValueError(f"this model's head predicts {head.predicts}: a teacher and its student predict tokens")
        return Divergence(loss.temperature, loss.entropy_gradient, loss.divergence)
    if head.is_value:
        return Values()
    return Logprobs(loss.temperature, entropy_gradient=loss.entropy_gradient)


def whole_sequences(micro_batch: MicroBatch, own: Predictions, cp_group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """Return the predictions for the micro-batch's sequences, float32 [T] each; 0 on tokens that are not trained.

    Args:
        micro_batch: the sequences.
        own: predictions of this rank's tokens.
        cp_group: the ranks that share the sequences.
    """
    stacked_PN = torch.stack(list(own.values()))
    whole_PT = stacked_PN.new_zeros(len(own), micro_batch.batch.n_tokens, dtype=torch.float32)
    whole_PT = whole_PT.index_copy(1, micro_batch.local.places_N, stacked_PN)
    if cp_group.size() > 1 and whole_PT.numel() > 0:
        whole_PT = SumOverGroup.apply(whole_PT, cp_group)
    # Stacking makes all of them require a gradient, even those for which the head computes none.
    return {
        name: whole_T if own[name].requires_grad else whole_T.detach()
        for name, whole_T in zip(own, whole_PT, strict=True)
    }


def apply_loss(
    loss: Loss, scale: float, micro_batch: MicroBatch, predictions: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, Metrics]:
    """Return `scale` times the loss of a micro-batch, and its metrics, the unscaled `loss` among them."""
    batch = micro_batch.batch
    total, metrics = loss(LossInputs(predictions, batch.mask_T, batch.lengths, batch.fields))
    return total * scale, {**metrics, "loss": Metric(total.detach())}


def keep_predictions(micro_batch: MicroBatch, predictions: dict[str, torch.Tensor]) -> tuple[torch.Tensor, Kept]:
    """Return a scalar, which nothing differentiates, and the predictions with their rows in the share."""
    predictions_PT = torch.stack(list(predictions.values()))
    return predictions_PT.sum(), (micro_batch.rows_T, predictions_PT)


def assemble_predictions(kept: Iterable[Kept], n_rows: int, n_tokens: int, device: torch.device) -> torch.Tensor:
    """Return the predictions of a share, float32 [P, T], from its micro-batches' predictions."""
    total_PT = torch.zeros(n_rows, n_tokens, device=device)
    for rows_T, predictions_PT in kept:
        total_PT[:, rows_T.to(device)] = predictions_PT
    return total_PT
