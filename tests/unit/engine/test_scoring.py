"""Sequences as a reward model reads them."""

from __future__ import annotations

import random

import torch

from fivefold.batch import Batch
from fivefold.engine.values import EndScores

END = 7


def test_the_state_behind_the_end_token_of_each_sequence_is_scored() -> None:
    draw = random.Random(3)
    for _ in range(200):
        rows = [[draw.randrange(10) for _ in range(draw.randint(1, 9))] for _ in range(draw.randint(0, 5))]
        lengths = tuple(len(row) for row in rows)
        tokens_T = torch.tensor([token for row in rows for token in row], dtype=torch.int64)
        batch = Batch(lengths, tokens_T, torch.ones(len(tokens_T)), {"advantages": torch.ones(len(tokens_T))})
        scored = EndScores(END).lay_out(batch)
        expected = [row if row[-1] == END else [*row, END] for row in rows]
        sequences = [tokens.tolist() for tokens in scored.split(scored.tokens_T)]
        assert [sequence[:-1] for sequence in sequences] == expected
        masks = [mask.tolist() for mask in scored.split(scored.mask_T)]
        assert masks == [[0.0] * len(row) + [1.0] for row in expected]
        assert all(new <= old + EndScores.n_appended for new, old in zip(scored.lengths, lengths, strict=True))
        assert not scored.fields
