"""How training on a token changes the entropy, to first order, by which some losses leave tokens out.

A token of probability p_t, where the distribution has the entropy H, has S_t = p_t (H + log p_t): the entropy falls if
the logit of a token with S_t > 0 rises (arXiv 2602.03392). Over all tokens v that might have been sampled, its
expectation is sum_v p_v^2 (H + log p_v). As in `logprobs.py`, the vocabulary is sharded over tensor-parallel ranks, and
the full [tokens, vocabulary] logits never exist at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fivefold.engine.heads import Head, OutputLayer, Predictions
from fivefold.engine.logprobs import Vocabulary, logits_of
from fivefold.engine.scores import Logprobs
from fivefold.engine.sequences import MicroBatch


@dataclass(frozen=True)
class EntropyChanges(Logprobs):
    """Log-probs as the column `name`, and S as the column `entropy_changes`, 0 on tokens that are not trained."""

    name: str = "old_logprobs"
    less_expected: bool = False
    """Whether the expectation of S is subtracted from it."""

    @property
    def n_rows(self) -> int:  # type: ignore[override]
        """Number of predictions that `predict` returns."""
        return Logprobs.n_rows + self.less_expected

    def predict(self, head: Head, hidden_NH: torch.Tensor, output: OutputLayer, micro_batch: MicroBatch) -> Predictions:
        """Predict `logprobs`, `entropy` and, if it is subtracted, the expectation as `expected`."""
        found = dict(super().predict(head, hidden_NH, output, micro_batch))
        if self.less_expected:
            found["expected"] = linear_expected_change(
                hidden_NH, output.weight_VH, head.vocabulary, self.temperature, found["entropy"]
            )
        return found

    def columns(self, rows_PT: torch.Tensor, mask_T: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return both columns, float32 [T] each."""
        logprobs_T, entropy_T = rows_PT[0], rows_PT[1]
        changes_T = logprobs_T.exp() * (entropy_T + logprobs_T)
        if self.less_expected:
            changes_T = changes_T - rows_PT[2]
        return {self.name: logprobs_T, "entropy_changes": torch.where(mask_T.bool(), changes_T, 0.0)}


@torch.no_grad()
def linear_expected_change(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    vocabulary: Vocabulary,
    temperature: float,
    entropy_N: torch.Tensor,
) -> torch.Tensor:
    """Return sum_v p_v^2 (H + log p_v) of p = softmax(hidden @ weight.T / temperature), float32 [N], without gradient.

    Args:
        hidden_NH: the same on all ranks.
        weight_VH: this rank's rows of the output layer.
        vocabulary: how the rows are sharded.
        temperature: divides the logits.
        entropy_N: H, in nats.
    """
    _, real_rows = vocabulary.own_rows(weight_VH)
    # Of this rank's rows: log sum e^l, log sum e^2l, and the mean of l, weighted by e^2l.
    sums_3N = hidden_NH.new_full((3, len(hidden_NH)), -torch.inf, dtype=torch.float32)
    sums_3N[2] = 0
    for rows in vocabulary.chunks(len(hidden_NH)) if real_rows else []:
        logits = logits_of(hidden_NH[rows], weight_VH[:real_rows], temperature)
        sums_3N[0, rows] = logits.logsumexp(1)
        sums_3N[1, rows] = logits.mul_(2).logsumexp(1)
        weights = (logits - sums_3N[1, rows].unsqueeze(1)).exp_()
        sums_3N[2, rows] = weights.mul_(logits).sum(1) / 2
    once_RN, twice_RN, mean_RN = vocabulary.gathered(sums_3N).unbind(1)
    once_N, twice_N = once_RN.logsumexp(0), twice_RN.logsumexp(0)
    mean_N = ((twice_RN - twice_N).exp() * mean_RN).sum(0)
    return (twice_N - 2 * once_N).exp() * (entropy_N.detach().float() + mean_N - once_N)
