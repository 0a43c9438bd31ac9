"""A converted tokenizer splits texts as the original does, which the file only states by a name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_gguf import CHAT_TEMPLATE, MERGES, VOCABULARY, GGUFFile, TinyModel, tokenizer_metadata
from tokenizers.pre_tokenizers import PreTokenizer
from transformers import AutoTokenizer, GPT2Tokenizer, PreTrainedTokenizerBase, Qwen2Tokenizer

from fivefold.convert.gguf_model import convert_gguf
from fivefold.convert.tokenizer import build_tokenizer

TEXT = "abc12345 + 3's\n\nab'S"
WORDS = {
    "gpt-2": ["abc", "12345", "Ġ+", "Ġ3", "'s", "Ċ", "Ċ", "ab", "'", "S"],
    "smollm": ["abc", "1", "2", "3", "4", "5", "Ġ+", "Ġ", "3", "'s", "Ċ", "Ċ", "ab", "'", "S"],
    "qwen2": ["abc", "1", "2", "3", "4", "5", "Ġ+", "Ġ", "3", "'s", "ĊĊ", "ab", "'S"],
    "llama-bpe": ["abc", "123", "45", "Ġ+", "Ġ", "3", "'s", "ĊĊ", "ab", "'S"],
}


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def convert(
    request: pytest.FixtureRequest, tiny_model: Callable[[str], TinyModel], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., PreTrainedTokenizerBase]:
    def run(splitting: str, **metadata: object) -> PreTrainedTokenizerBase:
        folder: Path = tmp_path_factory.mktemp(splitting)
        file = GGUFFile(tiny_model(request.param), splitting)
        file.metadata |= metadata
        convert_gguf(file.write(folder / "model.gguf"), folder / "out")
        return AutoTokenizer.from_pretrained(folder / "out")

    return run


@pytest.mark.parametrize("splitting", WORDS)
def test_texts_are_split_as_the_name_says(splitting: str, convert: Callable[..., PreTrainedTokenizerBase]) -> None:
    pre_tokenizer: PreTokenizer = convert(splitting).backend_tokenizer.pre_tokenizer
    assert [word for word, _ in pre_tokenizer.pre_tokenize_str(TEXT)] == WORDS[splitting]


def test_special_tokens_keep_their_roles(convert: Callable[..., PreTrainedTokenizerBase]) -> None:
    tokenizer = convert("smollm")
    assert tokenizer.tokenize("<|start|>12<tool>[unused]<|end|>")[:4] == ["<|start|>", "1", "2", "<tool>"]
    assert "[unused]" not in tokenizer.get_vocab()
    ids = tokenizer("<|start|>a<tool><|end|>")["input_ids"]
    assert tokenizer.decode(ids) == "<|start|>a<tool><|end|>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<tool>"
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<|start|>", "<|end|>", "<|end|>")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<|start|>hi<|end|>"
    assert tokenizer.chat_template == CHAT_TEMPLATE


@pytest.mark.parametrize(("bos", "eos"), [(True, False), (False, True), (True, True)])
def test_texts_are_surrounded_as_the_file_says(
    bos: bool, eos: bool, convert: Callable[..., PreTrainedTokenizerBase]
) -> None:
    keys = gguf.Keys.Tokenizer
    tokenizer = convert("llama-bpe", **{keys.ADD_BOS: bos, keys.ADD_EOS: eos})
    ab = VOCABULARY["ab"]
    assert tokenizer("ab")["input_ids"] == [1] * bos + [ab] + [2] * eos
    assert tokenizer("ab", add_special_tokens=False)["input_ids"] == [ab]


def test_a_file_that_does_not_say_begins_texts_as_llama_cpp_does() -> None:
    ab, keys = VOCABULARY["ab"], gguf.Keys.Tokenizer
    for splitting, expected in (("llama-bpe", [1, ab]), ("qwen2", [ab])):
        metadata = tokenizer_metadata(splitting)
        del metadata[keys.ADD_BOS]
        assert build_tokenizer(metadata).encode("ab").ids == expected
        del metadata[keys.BOS_ID]
        assert build_tokenizer(metadata).encode("ab").ids == [ab]
        with pytest.raises(ValueError, match="add_bos_token is true, but the file has no"):
            build_tokenizer({**metadata, keys.ADD_BOS: True})
        del metadata[keys.MERGES]
        with pytest.raises(ValueError, match=r"tokenizer\.ggml\.merges is missing"):
            build_tokenizer(metadata)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet=st.one_of(st.sampled_from("ab c123'sS+\n\té²½é"), st.characters(codec="utf-8"))))
@pytest.mark.parametrize(("splitting", "reference_class"), [("gpt-2", GPT2Tokenizer), ("qwen2", Qwen2Tokenizer)])
def test_any_text_has_the_tokens_of_the_original_class(
    splitting: str, reference_class: type[PreTrainedTokenizerBase], text: str
) -> None:
    reference = reference_class(vocab=VOCABULARY, merges=[tuple(merge.split(" ")) for merge in MERGES])
    assert build_tokenizer(tokenizer_metadata(splitting)).encode(text).ids == reference(text)["input_ids"]


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_any_text_survives_a_round_trip(text: str) -> None:
    tokenizer = build_tokenizer(tokenizer_metadata("smollm"))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
