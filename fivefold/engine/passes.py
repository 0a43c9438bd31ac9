"""What every engine does behind the head, with the predictions of a micro-batch.

predictions of this rank's tokens ─> whole sequences ─> apply_loss: a scalar to differentiate, and metrics
                                                     ─> keep_predictions: the share's log-probs or values
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fivefold.algorithms.loss import Loss, LossInputs
from fivefold.engine.context_parallel import SumOverGroup
from fivefold.engine.heads import (
    Distilling,
    Head,
    HeadOptions,
    LogprobHead,
    OutputLayer,
    Predictions,
    SquaresScoring,
    TeacherTokens,
    TopKScoring,
)
from fivefold.engine.micro_batches import MicroBatch

COMPUTING = "computing"
"""What progress calls the passes over micro-batches."""

LossStep = Callable[[MicroBatch, dict[str, torch.Tensor]], tuple[torch.Tensor, Any]]
"""(micro-batch, predictions [T] by name) -> (scalar to differentiate, what is kept of the micro-batch)."""

Kept = tuple[torch.Tensor, torch.Tensor]
"""Rows of the share's batch, int64 [T], and their predictions, float32 [P, T]."""


@dataclass(frozen=True)
class Scoring:
    """The head's options if nothing is trained."""

    temperature: float
    entropy_gradient: bool = False


def predict(
    head: Head, hidden_NH: torch.Tensor, output: OutputLayer, micro_batch: MicroBatch, options: HeadOptions
) -> Predictions:
    """Return what a loss, or a scoring, asks of the head for this rank's tokens.

    Args:
        head: the model's head.
        hidden_NH: the hidden state before each token that is predicted.
        output: this rank's part of the output layer.
        micro_batch: the sequences; a teacher's tokens are in the fields `teacher_tokens` and `teacher_token_logprobs`.
        options: the loss, or the options of a scoring.
    """
    if isinstance(options, TopKScoring):
        return _logprob_head(head).top_k(hidden_NH, output, options)
    targets_N = micro_batch.local.targets_N
    if isinstance(options, Distilling) and (direction := options.divergence) is not None:
        fields, places_N = micro_batch.batch.fields, micro_batch.local.places_N
        teacher = TeacherTokens(fields["teacher_tokens"][places_N].long(), fields["teacher_token_logprobs"][places_N])
        pupil = _logprob_head(head)
        return pupil.predict_beside_teacher(hidden_NH, output, targets_N, options, teacher, direction)
    own = head.predict(hidden_NH, output, targets_N, options)
    if isinstance(options, SquaresScoring):
        return {**own, "squares": _logprob_head(head).sum_of_squares(hidden_NH, output, options.temperature)}
    return own


def _logprob_head(head: Head) -> LogprobHead:
    if not isinstance(head, LogprobHead):
        raise ValueError(f"this model's head predicts {', '.join(head.names)}: a teacher and its pupil predict tokens")
    return head


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
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return `scale` times the loss of a micro-batch, and its metrics, the unscaled `loss/sum` among them."""
    batch = micro_batch.batch
    total, metrics = loss(LossInputs(predictions, batch.mask_T, batch.lengths, batch.fields))
    return total * scale, {**metrics, "loss/sum": total.detach()}


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


def check_head(head: Head, names: tuple[str, ...]) -> None:
    """Check that a head predicts what is asked for.

    Raises:
        ValueError: it predicts something else.
    """
    if head.names != names:
        raise ValueError(
            f"this model's head predicts {', '.join(head.names)}, and {', '.join(names)} were asked for: "
            "a model that is built with value_head=True predicts values, any other log-probs"
        )


def no_optimizer(verb: str) -> ValueError:
    """Return the error for a method that needs an optimizer, of an engine that has none."""
    return ValueError(f"this engine was built without an optimizer, so it cannot {verb}: pass its OptimizerConfig")
