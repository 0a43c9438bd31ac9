"""Rewards read completions as the model wrote them."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import pytest

from fivefold.rollout.tokenizer import decoded, fix_date
from tests.unit.data.conftest import VOCAB, build_tokenizer


def test_spaces_before_punctuation_stay_whatever_the_tokenizer_asks_for() -> None:
    tokenizer = build_tokenizer("$A")
    tokenizer.clean_up_tokenization_spaces = True
    words = (["a", ".", "</s>"], ["b", "?"], [])
    tokens = [np.array([VOCAB[word] for word in of_one], np.int32) for of_one in words]
    assert decoded(tokenizer, tokens) == ["a .", "b ?", ""]


@pytest.mark.parametrize(
    ("template", "written"),
    [
        # Llama 3.2's
        ('{% if strftime_now is defined %}{% set day = strftime_now("%d %b %Y") %}{% endif %}{{ day }}', "05 Mar 2024"),
        ("{{ strftime_now( '%Y-%m-%d' ) + ' ' + strftime_now('%A') }}", "2024-03-05 Tuesday"),
        ("{{ messages[0].content }}", "strftime_now('%d')"),
    ],
)
def test_a_chat_template_writes_the_date_that_was_fixed(template: str, written: str) -> None:
    tokenizer, messages = build_tokenizer("$A"), [{"role": "user", "content": "strftime_now('%d')"}]
    for templates in (template, {"default": template}):
        tokenizer.chat_template = templates
        fix_date(tokenizer, datetime(2024, 3, 5, 23, 59, tzinfo=UTC))
        assert tokenizer.apply_chat_template(messages, tokenize=False) == written


def test_a_tokenizer_without_a_chat_template_stays_without() -> None:
    tokenizer = build_tokenizer("$A")
    tokenizer.chat_template = None
    fix_date(tokenizer, datetime(2024, 3, 5, tzinfo=UTC))
    assert tokenizer.chat_template is None
