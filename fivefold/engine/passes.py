"""What every engine does around the head: what a loss asks of it, and what its predictions become.

predictions of this rank's tokens ─> whole sequences ─> apply_loss: a scalar to differentiate, and metrics
                                                     ─> keep_predictions: rows of the whole share
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from fivefold.algorithms.distillation import Direction
from fivefold.algorithms.loss import Loss, LossInputs
from fivefold.algorithms.metrics import Metric, Metrics
from fivefold.engine.context_parallel import SumOverGroup
from fivefold.engine.distillation import Divergence
from fivefold.engine.heads import Asked, Head, Logprobs, Predictions, Score
from fivefold.engine.sequences import MicroBatch
from fivefold.engine.values import Values

COMPUTING = "computing"
"""What progress calls the passes over micro-batches."""

LossStep = Callable[[MicroBatch, dict[str, torch.Tensor]], tuple[torch.Tensor, Any]]
"""(micro-batch, predictions [T] by name) -> (scalar to differentiate, what is kept of the micro-batch)."""

Kept = tuple[torch.Tensor, torch.Tensor]
"""Rows of the share's batch, int64 [T], and their predictions, float32 [P, T]."""


@runtime_checkable
class Distilling(Protocol):
    """A loss that may need the divergence of the model's distributions from a teacher's."""

    @property
    def divergence(self) -> Direction | None:
        """Direction of the divergence; None: it is not needed."""


def asked_by(loss: Loss, head: Head) -> Asked:
    """Return what a loss asks of the head.

    Raises:
        ValueError: the divergence from a teacher's distributions, of a value head.
    """
    direction = loss.divergence if isinstance(loss, Distilling) else None
    if direction is not None:
        if head.is_value:
            raise ValueError(f"this model's head predicts {head.predicts}: a teacher and its student predict tokens")
        return Divergence(loss.temperature, loss.entropy_gradient, direction)
    if head.is_value:
        return Values()
    return Logprobs(loss.temperature, entropy_gradient=loss.entropy_gradient)


def check_score(what: Score, head: Head) -> None:
    """Check that a head predicts what a score needs.

    Raises:
        ValueError: it predicts something else.
    """
    if what.of_values != head.is_value:
        raise ValueError(
            f"this model's head predicts {head.predicts}, and {what.name} were asked for: "
            "a model that is built with value_head=True predicts values, any other log-probs"
        )


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
    # Stacking makes all of them require a gradient, also those for which the head computes none.
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
    """Return a scalar, which nobody differentiates, and the predictions with their rows in the share."""
    predictions_PT = torch.stack(list(predictions.values()))
    return predictions_PT.sum(), (micro_batch.rows_T, predictions_PT)


def assemble_predictions(kept: Iterable[Kept], n_names: int, n_tokens: int, device: torch.device) -> torch.Tensor:
    """Return the predictions of a share, float32 [names, T], from those of its micro-batches."""
    total_PT = torch.zeros(n_names, n_tokens, device=device)
    for rows_T, predictions_PT in kept:
        total_PT[:, rows_T.to(device)] = predictions_PT
    return total_PT


def no_optimizer(verb: str) -> ValueError:
    """Return the error for a method that needs an optimizer, of an engine that has none."""
    return ValueError(f"this engine was built without an optimizer, so it cannot {verb}: pass its OptimizerConfig")
