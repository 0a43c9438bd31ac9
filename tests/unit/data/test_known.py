"""Readers of data sets whose columns are neither prompts nor conversations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedTokenizerFast

from fivefold.config.schema.data import SFTDatasetConfig
from fivefold.config.schema.preferences import PreferenceDatasetConfig
from fivefold.data.preferences import load_pairs
from fivefold.data.rows import load_rows
from fivefold.data.sft import load_sft

Write = Callable[..., str]
USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}


def test_pairs_of_helpsteer3_have_the_better_response_first(
    tokenizer: PreTrainedTokenizerFast, write_jsonl: Write
) -> None:
    rows = [
        {"context": context, "response1": "1", "response2": "2", "overall_preference": preference}
        for context, preference in (("hi", -2), ([USER, ANSWER, USER], 1), ("hi", 0))
    ]
    keys = {"path": write_jsonl(rows), "reader": "fivefold.data.known:helpsteer3", "apply_chat_template": True}
    config = PreferenceDatasetConfig.model_validate({**keys, "batch_size": 1})
    found = load_rows(config)
    assert [row["prompt"] for row in found] == [[USER], [USER, ANSWER, USER], [USER]]
    assert [(row["chosen"], row["rejected"]) for row in found] == [("1", "2"), ("2", "1"), ("1", "1")]
    assert len(load_pairs(config, tokenizer).examples) == 3


def test_conversations_of_squad_have_the_passage_as_the_systems_message(
    tokenizer: PreTrainedTokenizerFast, write_jsonl: Write
) -> None:
    rows: list[dict[str, Any]] = [
        {"context": "1+1=2", "question": "1+1=", "answers": {"text": ["2", "3"], "answer_start": [0, 1]}}
    ]
    keys = {"path": write_jsonl(rows), "reader": "fivefold.data.known:squad", "messages_key": "messages"}
    config = SFTDatasetConfig.model_validate({**keys, "batch_size": 1})
    [row] = load_rows(config)
    assert [(message["role"], message["content"]) for message in row["messages"]] == [
        ("system", "1+1=2"), ("user", "1+1="), ("assistant", "2"),
    ]  # fmt: skip
    [example] = load_sft(config, tokenizer).examples
    assert len(example.response_ids) == 2  # the answer and the end token
