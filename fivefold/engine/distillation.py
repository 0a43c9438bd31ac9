"""Distillation over several tokens: a teacher's most likely tokens, and a student's divergence from them.

As in `logprobs.py`, the vocabulary is sharded over tensor-parallel ranks, and the full [tokens, vocabulary] logits
never exist at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fivefold.algorithms.distillation import Distillation, at
from fivefold.engine.heads import Asked, Head, OutputLayer, Predictions
from fivefold.engine.logprobs import Vocabulary, linear_logprobs, logits_of
from fivefold.engine.scores import Score
from fivefold.engine.sequences import MicroBatch

TOKENS, LOGPROBS = "teacher_tokens", "teacher_token_logprobs"
"""Columns of a teacher: its k most likely tokens before each token, int32 [T, k], and their log-probs, float32."""


@dataclass(frozen=True)
class TopK(Score):
    """The k most likely tokens before each token, and their log-probs, as the columns of a teacher."""

    k: int
    temperature: float
    """Temperature that divides the logits."""
    place: int = 0
    """Place of the model among the teachers of the sequences."""

    @property
    def name(self) -> str:
        """Name of the column of tokens."""
        return at(TOKENS, self.place)

    @property
    def n_rows(self) -> int:
        """Two rows for each of the k tokens: the token and its log-prob."""
        return 2 * self.k

    def predict(self, head: Head, hidden_NH: torch.Tensor, output: OutputLayer, micro_batch: MicroBatch) -> Predictions:
        """Predict the tokens, as float32, which is exact up to 2^24, then their log-probs."""
        tokens_NK, logprobs_NK = linear_top_k(hidden_NH, output.weight_VH, self.k, head.vocabulary, self.temperature)
        rows = torch.cat([tokens_NK.float(), logprobs_NK], 1).T
        return {str(place): row for place, row in enumerate(rows)}

    def columns(self, rows_PT: torch.Tensor, mask_T: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return both columns; 0 on tokens that are not trained."""
        tokens_TK, logprobs_TK = rows_PT[: self.k].T.int(), rows_PT[self.k :].T
        return {self.name: tokens_TK.contiguous(), at(LOGPROBS, self.place): logprobs_TK.contiguous()}


@dataclass(frozen=True)
class Divergence(Asked):
    """Log-probs and entropies, and from the same logits the divergence from teachers (`coarse_divergence`).

    The micro-batch has the teachers' columns, of the same temperature.
    """

    temperature: float
    entropy_gradient: bool
    distillation: Distillation

    def predict(self, head: Head, hidden_NH: torch.Tensor, output: OutputLayer, micro_batch: MicroBatch) -> Predictions:
        """Predict `logprobs`, `entropy` and `divergence`."""
        fields, places_N, how = micro_batch.batch.fields, micro_batch.local.places_N, self.distillation
        teachers = list(how.places(TOKENS, fields))
        tokens = [fields[at(TOKENS, place)][places_N].long() for place, _ in teachers]
        logprobs, entropy, logprobs_NK = linear_logprobs(
            hidden_NH,
            output.weight_VH,
            micro_batch.local.targets_N,
            head.vocabulary,
            temperature=self.temperature,
            entropy_gradient=self.entropy_gradient,
            others_NK=tokens[0] if len(tokens) == 1 else torch.cat(tokens, 1),
            n_lists=len(tokens),
        )
        divergence = torch.zeros_like(logprobs)
        own = logprobs_NK.split([each.shape[1] for each in tokens], 1)
        for (place, weight), own_NK in zip(teachers, own, strict=True):
            told_NK = fields[at(LOGPROBS, place)][places_N]
            from_teacher = how.between(own_NK, told_NK)
            divergence = divergence + (weight if isinstance(weight, float) else weight[places_N]) * from_teacher
        return {"logprobs": logprobs, "entropy": entropy, "divergence": divergence}


@torch.no_grad()
def linear_top_k(
    hidden_NH: torch.Tensor, weight_VH: torch.Tensor, k: int, vocabulary: Vocabulary, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k most likely tokens of softmax(hidden @ weight.T / temperature), most likely first.

    Args:
        hidden_NH: the same on all ranks.
        weight_VH: this rank's rows of the output layer.
        k: number of tokens, at most the size of the vocabulary.
        vocabulary: how the rows are sharded.
        temperature: divides the logits.

    Returns:
        The tokens, int64 [N, k], and their log-probs, float32 [N, k], without gradient.
    """
    first, real_rows = vocabulary.own_rows(weight_VH)
    tokens_NK = torch.zeros(len(hidden_NH), k, dtype=torch.int64, device=hidden_NH.device)
    logits_NK = hidden_NH.new_full((len(hidden_NH), k), -torch.inf, dtype=torch.float32)
    sums_N = hidden_NH.new_full((len(hidden_NH),), -torch.inf, dtype=torch.float32)
    for rows in vocabulary.chunks(len(hidden_NH)) if real_rows else []:
        logits = logits_of(hidden_NH[rows], weight_VH[:real_rows], temperature)
        own = min(k, real_rows)
        logits_NK[rows, :own], tokens_NK[rows, :own] = logits.topk(own)
        sums_N[rows] = logits.logsumexp(1)
    every_token, every_logit = vocabulary.gathered(tokens_NK + first), vocabulary.gathered(logits_NK)
    best_NK, places_NK = torch.cat(list(every_logit), 1).topk(k)
    tokens_NK = torch.cat(list(every_token), 1).gather(1, places_NK)
    return tokens_NK, best_NK - vocabulary.gathered(sums_N).logsumexp(0)[:, None]
