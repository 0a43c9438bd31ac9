"""Texts far beyond the limit of tokens: they count as too long, and are not tokenized whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from fivefold.config.schema.data import DatasetConfig, SFTDatasetConfig
from fivefold.data.prompts import load_prompts
from fivefold.data.sft import load_sft
from tests.unit.data.conftest import VOCAB, build_tokenizer

Write = Callable[..., str]
LONG = 1_000_000


class Counting(PreTrainedTokenizerFast):
    """Counts the characters that it tokenizes."""

    n_characters = 0

    def __call__(self, text: str, **options: Any) -> Any:  # type: ignore[override]
        self.n_characters += len(text)
        return super().__call__(text, **options)


@pytest.fixture
def counting() -> Counting:
    """A tokenizer with one token for each character."""
    plain = build_tokenizer("<s> $A")
    counting = Counting(tokenizer_object=plain.backend_tokenizer, eos_token="</s>", unk_token="<unk>")
    counting.chat_template = plain.chat_template
    return counting


@pytest.mark.parametrize("prompt", ["x" * LONG, [{"role": "user", "content": "x" * LONG}]])
def test_only_the_beginning_of_a_long_prompt_is_tokenized(counting: Counting, write_jsonl: Write, prompt: Any) -> None:
    path = write_jsonl([{"prompt": text, "answer": "1"} for text in ("ab", prompt, "c")])
    data = load_prompts(DatasetConfig(path=path, answer_key="answer", max_length=8), counting)
    assert [p.token_ids for p in data.prompts] == [(VOCAB["<s>"], VOCAB["a"], VOCAB["b"]), (VOCAB["<s>"], VOCAB["c"])]
    assert (data.n_rows, data.n_too_long) == (3, 1)
    assert counting.n_characters < 0.05 * LONG


@pytest.mark.parametrize("key", ["prompt", "response"])
def test_only_the_beginning_of_a_long_example_is_tokenized(counting: Counting, write_jsonl: Write, key: str) -> None:
    row = {"prompt": "a", "response": "b"}
    path = write_jsonl([row, {**row, key: "x" * LONG}])
    data = load_sft(SFTDatasetConfig(path=path, max_length=8), counting)
    assert (len(data), data.n_too_long) == (1, 1)
    assert counting.n_characters < 0.05 * LONG


def test_a_long_text_of_few_tokens_is_not_too_long(write_jsonl: Write) -> None:
    words = Tokenizer(WordLevel({"<unk>": 0, "</s>": 1, "a": 2}, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", unk_token="<unk>")
    texts = ["a" + " " * LONG + "a", "x" * LONG]
    path = write_jsonl([{"prompt": text, "answer": "1"} for text in texts])
    data = load_prompts(DatasetConfig(path=path, answer_key="answer", max_length=8), tokenizer)
    assert [p.token_ids for p in data.prompts] == [(2, 2), (0,)]


def test_a_prompt_that_is_longer_than_the_model_brings_no_warning_of_the_tokenizer(
    write_jsonl: Write, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """It says that errors will come of it, and the prompt is dropped."""
    tokenizer = build_tokenizer("<s> $A")
    tokenizer.model_max_length = 4
    path = write_jsonl([{"prompt": text, "answer": "1"} for text in ("a b c a b c a b c", "a")])
    data = load_prompts(DatasetConfig(path=path, answer_key="answer", max_length=4), tokenizer)
    assert data.n_too_long == 1
    assert "Token indices" not in capfd.readouterr().err + caplog.text
