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


OWN_CODE = """
from transformers import PreTrainedTokenizer


class Letters(PreTrainedTokenizer):
    def __init__(self, **kwargs):
        self.letters = "<abc"
        super().__init__(pad_token="<", eos_token="<", **kwargs)

    vocab_size = property(lambda self: len(self.letters))

    def get_vocab(self):
        return {letter: number for number, letter in enumerate(self.letters)}

    def _tokenize(self, text):
        return list(text)

    def _convert_token_to_id(self, token):
        return self.letters.index(token)

    def _convert_id_to_token(self, index):
        return self.letters[index]

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)

    def save_vocabulary(self, folder, filename_prefix=None):
        return ()
"""


def test_a_tokenizer_that_is_code_of_its_folder_is_run_if_the_recipe_trusts_it(tmp_path: Path) -> None:
    settings = {"tokenizer_class": "Letters", "auto_map": {"AutoTokenizer": ["tokenization_letters.Letters", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "tokenization_letters.py").write_text(OWN_CODE)
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v3"}')
    tokenizer = load_tokenizer(str(tmp_path), trust_remote_code=True)
    assert tokenizer("cab").input_ids == [3, 1, 2]
    assert decoded(tokenizer, [np.array([3, 1, 2, 0], np.int32)]) == ["cab"]


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
