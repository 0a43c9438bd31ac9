"""Several paths, readers of one's own, system prompts, and prompts that are cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from fivefold.config.schema.data import DatasetConfig, PreferenceRowsConfig, SFTRowsConfig
from fivefold.data.preferences import load_pairs
from fivefold.data.prompts import load_prompts
from fivefold.data.rows import load_rows
from fivefold.data.sft import load_sft
from tests.unit.data.conftest import VOCAB

Write = Callable[..., str]
SYSTEM = "Be brief."
BEGINS = f"<|system|>{SYSTEM}"


def plain(path: str | list[str], **options: Any) -> DatasetConfig:
    return DatasetConfig(path=path, prompt_key="question", answer_key="answer", **options)


def rows_of(*questions: str) -> list[dict[str, str]]:
    return [{"question": question, "answer": "1"} for question in questions]


def test_several_paths_are_one_data_set(write_jsonl: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    paths = [write_jsonl(rows_of("a", "b"), "one.jsonl"), write_jsonl(rows_of("c"), "two.jsonl")]
    prompts = load_prompts(plain(paths), tokenizer).prompts
    assert [(prompt.index, prompt.text) for prompt in prompts] == [(0, "a"), (1, "b"), (2, "c")]
    assert len(load_rows(plain(paths, limit=1))) == 1
    with pytest.raises(ValueError, match="at least 1 item"):
        plain([])


READER = """
def halves(path, split):
    for line in open(path):
        for part in line.split():
            yield {"question": part, "answer": split}

def named(path, split, answer):
    yield {"question": path, "answer": answer}

def broken(path, split):
    yield {"question": "a", "answer": "b"}
    raise KeyError("no such column")

def texts(path, split):
    return ["a"]
"""


def test_a_users_function_reads_the_rows(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    code, data = tmp_path / "own.py", tmp_path / "data.odd"
    code.write_text(READER)
    data.write_text("a b\nc\n")
    prompts = load_prompts(plain(str(data), reader=f"{code}:halves", split="test"), tokenizer).prompts
    assert [(prompt.text, prompt.ground_truth) for prompt in prompts] == [("a", "test"), ("b", "test"), ("c", "test")]
    [own] = load_rows(plain("x", reader=f"{code}:named", reader_kwargs={"answer": "7"}))
    assert own == {"question": "x", "answer": "7"}
    with pytest.raises(ValueError, match=r"(?s)reader=.*broken' failed on .*no such column"):
        load_rows(plain(str(data), reader=f"{code}:broken"))
    with pytest.raises(ValueError, match="row 1 is a str, not a mapping of columns"):
        load_rows(plain(str(data), reader=f"{code}:texts"))
    with pytest.raises(ValueError, match="defines no 'absent'"):
        load_rows(plain(str(data), reader=f"{code}:absent"))


@pytest.mark.parametrize(
    ("truncation", "kept"), [("drop", ["ab"]), ("left", ["cdef", "ab"]), ("right", ["<s>abc", "ab"])]
)
def test_long_prompts_are_dropped_or_cut(
    truncation: str, kept: list[str], write_jsonl: Write, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = write_jsonl(rows_of("abcdef", "ab"))
    data = load_prompts(plain(path, truncation=truncation, max_length=4), tokenizer)
    assert [prompt.text.replace(" ", "") for prompt in data.prompts] == kept
    assert [len(prompt.token_ids) for prompt in data.prompts] == [4] * (len(kept) - 1) + [3]
    assert data.n_too_long == (truncation == "drop")


def test_the_end_of_a_very_long_prompt_is_kept(write_jsonl: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_jsonl(rows_of("a" * 100_000 + "xyz"))
    [prompt] = load_prompts(plain(path, truncation="left", max_length=3), tokenizer).prompts
    assert prompt.token_ids == tuple(VOCAB[letter] for letter in "xyz")


def test_a_long_prompt_may_be_an_error(write_jsonl: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_jsonl(rows_of("ab", "abcdef"))
    with pytest.raises(ValueError, match=r"row 2 of .*: the prompt has more than max_length=4 tokens"):
        load_prompts(plain(path, truncation="error", max_length=4), tokenizer)


def test_every_chat_begins_with_the_system_prompt(write_jsonl: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    own = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "a"}]
    path = write_jsonl(
        [{"question": [{"role": "user", "content": "a"}], "answer": ""}, {"question": own, "answer": ""}]
    )
    prompts = load_prompts(plain(path, system_prompt=SYSTEM), tokenizer).prompts
    assert [prompt.text for prompt in prompts] == [
        f"{BEGINS}<|user|>a<|assistant|>",
        "<|system|>Mine.<|user|>a<|assistant|>",
    ]
    assert prompts[0].messages is not None
    assert prompts[0].messages[0]["role"] == "system"
    texts = write_jsonl(rows_of("a"), "texts.jsonl")
    [prompt] = load_prompts(plain(texts, system_prompt=SYSTEM, apply_chat_template=True), tokenizer).prompts
    assert prompt.text == f"{BEGINS}<|user|>a<|assistant|>"
    with pytest.raises(ValueError, match="system_prompt begins chats, and 'question' holds a text"):
        load_prompts(plain(texts, system_prompt=SYSTEM), tokenizer)


def test_examples_and_pairs_have_the_system_prompt_too(write_jsonl: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    talk = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"))]
    expected = tuple(tokenizer(f"{BEGINS}<|user|>a<|assistant|>", add_special_tokens=False)["input_ids"])
    path = write_jsonl([{"talk": talk, "prompt": talk[:1], "response": talk[1:]}])
    for keys in ({"messages_key": "talk"}, {}):
        [example] = load_sft(SFTRowsConfig(path=path, system_prompt=SYSTEM, **keys), tokenizer).examples
        assert example.prompt_ids == expected
    pairs = write_jsonl([{"chosen": talk, "rejected": [talk[0], {**talk[1], "content": "c"}]}], "pairs.jsonl")
    [pair] = load_pairs(PreferenceRowsConfig(path=pairs, system_prompt=SYSTEM), tokenizer).examples
    assert pair.chosen.prompt_ids == pair.rejected.prompt_ids == expected


def test_prompts_that_are_texts_come_into_a_text(write_jsonl: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_jsonl(rows_of("a {prompt}", "b"))
    template = "{x} Solve {prompt}, {prompt}!"
    prompts = load_prompts(plain(path, prompt_template=template), tokenizer).prompts
    assert [prompt.text for prompt in prompts] == ["{x} Solve a {prompt}, a {prompt}!", "{x} Solve b, b!"]
    [chat, _] = load_prompts(plain(path, prompt_template=template, apply_chat_template=True), tokenizer).prompts
    assert chat.messages == ({"role": "user", "content": prompts[0].text},)
    chat_messages = [{"role": "user", "content": "a"}]
    for written in (chat_messages, json.dumps(chat_messages)):
        chats = write_jsonl([{"question": written, "answer": ""}], "chats.jsonl")
        with pytest.raises(ValueError, match=r"row 1 .*: prompt_template is for texts, and 'question' holds \["):
            load_prompts(plain(chats, prompt_template=template), tokenizer)
    with pytest.raises(ValueError, match=r"prompt_template has no {prompt}, so every prompt would be the same"):
        plain(path, prompt_template="Solve it.")


def test_a_share_of_the_prompts_is_held_out(write_jsonl: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_jsonl(rows_of(*(f"{index}" for index in range(40)), "x" * 20))
    data = load_prompts(DatasetConfig(path=path, prompt_key="question", answer_key="answer", max_length=10), tokenizer)
    kept, held = data.held_apart(0.25, seed=3)
    assert (len(kept), len(held)) == (30, 10)
    assert (kept.n_rows, kept.n_too_long, held.n_rows, held.n_too_long) == (31, 1, 10, 0)
    texts = [prompt.text for part in (kept, held) for prompt in part.prompts]
    assert sorted(texts, key=int) == list(map(str, range(40)))
    for part in (kept, held):
        assert [prompt.index for prompt in part.prompts] == list(range(len(part)))
    again, other = (data.held_apart(0.25, seed)[1].prompts for seed in (3, 4))
    assert again == held.prompts
    assert other != held.prompts
    assert [len(part) for part in data.held_apart(0.001, 3)] == [39, 1]
