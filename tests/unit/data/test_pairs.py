"""Pairs and labelled answers: their forms, their tokens, and their errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from fivefold.config.schema.data import DPODatasetConfig, PreferenceDatasetConfig
from fivefold.data.preferences import load_labelled, load_pairs, score_columns
from fivefold.data.sft import SFTExample
from tests.unit.data.conftest import VOCAB

Write = Callable[..., str]
USER = {"role": "user", "content": "hi"}
TEXTS = {"prompt": "1+1=", "chosen": "2", "rejected": "30"}


def answer(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def config(path: str, **options: Any) -> PreferenceDatasetConfig:
    return PreferenceDatasetConfig(path=path, **options)


def labelled(path: str, **options: Any) -> DPODatasetConfig:
    return DPODatasetConfig(path=path, **options)


def ids(*tokens: str) -> tuple[int, ...]:
    return tuple(VOCAB[token] for token in tokens)


def test_answers_in_texts_follow_the_prompt_and_end(tokenizer: PreTrainedTokenizerFast, write_jsonl: Write) -> None:
    (pair,) = load_pairs(config(write_jsonl([TEXTS])), tokenizer).examples
    prompt = ids("<s>", *"1+1=")
    assert pair.chosen == SFTExample(prompt, ids("2", "</s>"))
    assert pair.rejected == SFTExample(prompt, ids(*"30", "</s>"))
    assert pair.n_tokens == 8


def test_the_recipe_names_the_columns(tokenizer: PreTrainedTokenizerFast, write_jsonl: Write) -> None:
    path = write_jsonl([{"q": "1+1=", "good": "2", "bad": "30", "chosen": "9", "rejected": "9"}])
    (pair,) = load_pairs(config(path, prompt_key="q", chosen_key="good", rejected_key="bad"), tokenizer).examples
    assert (pair.chosen.response_ids, pair.rejected.response_ids) == (ids("2", "</s>"), ids(*"30", "</s>"))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "chosen": [answer("yes")], "rejected": [answer("no")]},
        {"prompt": "hi", "chosen": [answer("yes")], "rejected": [answer("no")]},
        {"chosen": [USER, answer("yes")], "rejected": [USER, answer("no")]},
        {"prompt": "hi", "chosen": [USER, answer("yes")], "rejected": [USER, answer("no")]},
        {"prompt": "hi", "chosen": json.dumps([answer("yes")]), "rejected": json.dumps([answer("no")])},
        {"chosen": json.dumps([USER, answer("yes")]), "rejected": json.dumps([USER, answer("no")])},
    ],
    ids=["messages", "a text and messages", "conversations", "conversations beside their prompt", "JSON", "JSON whole"],
)
def test_chat_messages_are_rendered_whole_and_split_behind_the_prompt(
    tokenizer: PreTrainedTokenizerFast, write_jsonl: Write, row: dict[str, Any]
) -> None:
    (pair,) = load_pairs(config(write_jsonl([row])), tokenizer).examples
    prompt = ids("<|user|>", *"hi", "<|assistant|>")
    assert pair.chosen == SFTExample(prompt, ids(*"yes", "</s>"))
    assert pair.rejected == SFTExample(prompt, ids(*"no", "</s>"))


def test_conversations_part_at_the_first_other_message(tokenizer: PreTrainedTokenizerFast, write_jsonl: Write) -> None:
    first = [USER, answer("so"), {"role": "user", "content": "?"}]
    row = {"chosen": [*first, answer("a")], "rejected": [*first, answer("b")]}
    (pair,) = load_pairs(config(write_jsonl([row])), tokenizer).examples
    assert pair.chosen.prompt_ids == ids("<|user|>", *"hi", "<|assistant|>", *"so", "<|user|>", "?", "<|assistant|>")
    assert (pair.chosen.response_ids, pair.rejected.response_ids) == (ids("a", "</s>"), ids("b", "</s>"))


def test_the_end_token_of_a_chat_template_is_not_doubled(
    tokenizer: PreTrainedTokenizerFast, write_jsonl: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        tokenizer, "chat_template", tokenizer.chat_template.replace("{% endfor %}", "</s>\n{% endfor %}")
    )
    (pair,) = load_pairs(config(write_jsonl([{"chosen": [USER, answer("a")], "rejected": [USER, answer("b")]}])),
                         tokenizer).examples  # fmt: skip
    assert pair.chosen.response_ids == ids("a", "</s>")


def test_a_pair_with_one_answer_that_is_too_long_is_dropped(
    tokenizer: PreTrainedTokenizerFast, write_jsonl: Write
) -> None:
    rows = [{"prompt": "ab", "chosen": "c" * n, "rejected": "d" * 2} for n in (1, 4)]  # 4 + n and 6 tokens
    data = load_pairs(config(write_jsonl(rows), max_length=6), tokenizer)
    assert (len(data), data.longest, data.usage) == (1, 6, "1 of 2 rows, 1 too long")
    with pytest.raises(ValueError, match=r"all 2 examples .* more than max_length=5 tokens"):
        load_pairs(config(write_jsonl(rows), max_length=5), tokenizer)


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, {}, "no column 'rejected', which rejected_key asks for"),
        ({"chosen": "b", "rejected": "c"}, {}, "no column 'prompt', which prompt_key asks for unless"),
        ({"prompt": None, "chosen": "b", "rejected": "c"}, {}, ": 'prompt' is null, which prompt_key asks for unless"),
        ({"prompt": "a", "chosen": "b", "rejected": [answer("c")]}, {}, "must both be texts, or both lists"),
        (
            {"prompt": "a", "chosen": [USER, answer("b")], "rejected": [answer("c")]},
            {},
            "one of 'chosen' and 'rejected' is a whole conversation, and the other an answer alone",
        ),
        (
            {"prompt": "a", "chosen": 1, "rejected": "c"},
            {},
            "'chosen' must be a text or a list of chat messages, not 1",
        ),
        (
            {"chosen": [USER, answer("b")], "rejected": [{"role": "user", "content": "other"}, answer("b")]},
            {},
            "must begin with the same messages, the prompt",
        ),
        (TEXTS, {"answer_key": "chosen"}, "answer_key='chosen' has no use"),
    ],
)
def test_pairs_that_cannot_be_used_are_refused(
    tokenizer: PreTrainedTokenizerFast, write_jsonl: Write, row: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load_pairs(config(write_jsonl([row]), **options), tokenizer)


def test_answers_have_labels_or_come_from_pairs(tokenizer: PreTrainedTokenizerFast, write_jsonl: Write) -> None:
    rows = [{"prompt": "1+1=", "response": "2", "label": True}, {"prompt": "1+1=", "response": "30", "label": False}]
    single = load_labelled(labelled(write_jsonl(rows), label_key="label"), tokenizer)
    paired = load_labelled(labelled(write_jsonl([TEXTS], "pairs.jsonl")), tokenizer)
    assert single.examples == paired.examples
    assert [each.is_desirable for each in single.examples] == [True, False]
    assert paired.usage == "1 of 1 rows"
    swapped = [{**row, "label": not row["label"]} for row in rows]
    other = load_labelled(labelled(write_jsonl(swapped, "swapped.jsonl"), label_key="label"), tokenizer)
    assert other.fingerprint() != single.fingerprint()
    messages = [{**row, "response": json.dumps([answer(str(row["response"]))])} for row in rows]
    in_json = load_labelled(labelled(write_jsonl(messages, "messages.jsonl"), label_key="label"), tokenizer)
    assert [each.answer.response_ids for each in in_json.examples] == [ids("2", "</s>"), ids(*"30", "</s>")]
    assert in_json.examples[0].answer.prompt_ids == ids("<|user|>", *"1+1=", "<|assistant|>")
    for texts in (("True", "False"), ("1", "0")):
        written = [{**row, "label": text} for row, text in zip(rows, texts, strict=True)]
        csv = load_labelled(labelled(write_jsonl(written, "texts.jsonl"), label_key="label"), tokenizer)
        assert csv.examples == single.examples
    rows[0]["label"] = "good"
    with pytest.raises(ValueError, match="'label' must be true or false, not 'good'"):
        load_labelled(labelled(write_jsonl(rows), label_key="label"), tokenizer)


def test_a_score_belongs_to_the_state_behind_the_last_token() -> None:
    columns = score_columns([SFTExample((5, 6), (7, 1)), SFTExample((5,), (1,))])
    assert columns.lengths_N.tolist() == [5, 3]
    assert columns.values["tokens"].tolist() == [5, 6, 7, 1, 1, 5, 1, 1]
    assert columns.values["mask"].tolist() == [False] * 4 + [True] + [False] * 2 + [True]
