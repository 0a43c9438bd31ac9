"""Scores of models with a value head: a critic's values, and a reward model's score of a whole sequence.

A reward model scores the last state of a sequence. A value belongs to the state before a token, so one more token is
appended, which alone is predicted. Nothing depends on which token that is.

    tokens   p p p r r E x      E: the end token, appended if the sequence lacks it; x: any token
    mask     0 0 0 0 0 0 1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fivefold.batch import Batch
from fivefold.engine.heads import Head, OutputLayer, Predictions
from fivefold.engine.scores import Score
from fivefold.engine.sequences import MicroBatch

N_APPENDED = 2
"""Most tokens that `EndScores` appends to a sequence."""


@dataclass(frozen=True)
class Values(Score):
    """The value of the state before each token, as the column `name`.

    Every tensor-parallel rank has the whole head and computes the same values in float32.
    """

    name = "values"
    n_rows = 1
    of_values = True

    def predict(self, head: Head, hidden_NH: torch.Tensor, output: OutputLayer, micro_batch: MicroBatch) -> Predictions:
        """Predict `values`."""
        hidden_NH = _PartOfSum.apply(hidden_NH, head.vocabulary.group.size())
        bias_V = None if output.bias_V is None else output.bias_V.float()
        values_N1 = torch.nn.functional.linear(hidden_NH.float(), output.weight_VH.float(), bias_V)
        return {"values": values_N1.squeeze(1)}

    def columns(self, rows_PT: torch.Tensor, mask_T: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the column of values, float32 [T]."""
        return {self.name: rows_PT[0]}


@dataclass(frozen=True)
class EndScores(Values):
    """The value of the state after each sequence's end token, on the token that follows it."""

    end_token: int

    name = "end_scores"
    n_appended = N_APPENDED

    def lay_out(self, batch: Batch) -> Batch:
        """Return the sequences without fields, each with its end token and one more token, the only trained one.

        Of a row with several sequences, the last one is scored.
        """
        rows = batch.split(batch.tokens_T)
        if batch.cuts is not None:
            rows = [tokens[len(tokens) - cuts[-1] :] for tokens, cuts in zip(rows, batch.cuts, strict=True)]
        sequences = [_ended(tokens, self.end_token) for tokens in rows]
        lengths = tuple(len(tokens) for tokens in sequences)
        tokens_T = torch.cat(sequences) if sequences else batch.tokens_T
        mask_T = torch.zeros(len(tokens_T))
        if lengths:
            mask_T[torch.tensor(lengths).cumsum(0) - 1] = 1.0
        return Batch(lengths, tokens_T, mask_T)


def _ended(tokens_L: torch.Tensor, end_token: int) -> torch.Tensor:
    """Return the tokens with the end token, unless they have it, and with one more token."""
    has_end = len(tokens_L) > 0 and int(tokens_L[-1]) == end_token
    return torch.cat([tokens_L, tokens_L.new_full((1 if has_end else N_APPENDED,), end_token)])


class _PartOfSum(torch.autograd.Function):
    """Identity whose gradient, the same on all `n` ranks of a group, becomes each rank's part of the sum over them."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, n: int) -> torch.Tensor:
        ctx.n = n
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad / ctx.n, None
