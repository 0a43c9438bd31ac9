"""Rewards read completions as the model wrote them."""

from __future__ import annotations

from fivefold.rollout.tokenizer import decoded
from tests.unit.data.conftest import VOCAB, build_tokenizer


def test_spaces_before_punctuation_stay_whatever_the_tokenizer_asks_for() -> None:
    tokenizer = build_tokenizer("$A")
    tokenizer.clean_up_tokenization_spaces = True
    sequences = [[VOCAB["a"], VOCAB["."], VOCAB["</s>"]], [VOCAB["b"], VOCAB["?"]]]
    assert decoded(tokenizer, sequences) == ["a .", "b ?"]
