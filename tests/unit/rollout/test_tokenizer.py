"""Rewards read completions as the model wrote them."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from fivefold.rollout.tokenizer import decoded, fix_date, load_tokenizer
from tests.unit.data.conftest import VOCAB, build_tokenizer


def test_spaces_before_punctuation_stay_whatever_the_tokenizer_asks_for() -> None:
    tokenizer = build_tokenizer("$A")
    tokenizer.clean_up_tokenization_spaces = True
    words = (["a", ".", "</s>"], ["b", "?"], [])
    tokens = [np.array([VOCAB[word] for word in of_one], np.int32) for of_one in words]
    assert decoded(tokenizer, tokens) == ["a .", "b ?", ""]


def test_a_tokenizer_that_is_code_of_its_folder_is_refused_without_a_question(tmp_path: Path) -> None:
    settings = {"tokenizer_class": "Other", "auto_map": {"AutoTokenizer": ["tokenization_other.Other", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "tokenization_other.py").write_text("raise AssertionError('code of the model ran')")
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v3"}')
    with pytest.raises(ValueError, match=r"is Python code of its folder \(tokenization_other.Other\), which"):
        load_tokenizer(str(tmp_path))


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
