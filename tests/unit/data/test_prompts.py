"""Prompt data sets: every source and schema, and the errors of data that cannot be used."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast

from fivefold.config.schema.data import DatasetConfig
from fivefold.data.prompts import load_prompts
from fivefold.data.rows import load_rows
from tests.unit.data.conftest import VOCAB, build_tokenizer

PLAIN = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(5)]
CHAT = [
    {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": f"{i}+1?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
        "extra_info": {"index": i},
    }
    for i in range(3)
]
Write = Callable[..., str]


def plain(path: str, **options: Any) -> DatasetConfig:
    return DatasetConfig(path=path, prompt_key="question", answer_key="answer", **options)


def ids(text: str) -> tuple[int, ...]:
    return tuple(VOCAB[character] for character in text)


def test_plain_columns_become_prompts(tokenizer: PreTrainedTokenizerFast, write_jsonl: Write) -> None:
    dataset = load_prompts(plain(write_jsonl(PLAIN)), tokenizer)
    assert [(p.index, p.text, p.ground_truth, p.data_source, p.extra_info) for p in dataset.prompts] == [
        (i, f"{i}+1=", str(i + 1), "", {}) for i in range(5)
    ]
    assert dataset.prompts[0].token_ids == (VOCAB["<s>"], *ids("0+1="))


def test_a_text_gets_no_end_token_from_the_tokenizer(write_jsonl: Write) -> None:
    closing = build_tokenizer("<s> $A </s>")
    dataset = load_prompts(plain(write_jsonl(PLAIN)), closing)
    assert dataset.prompts[0].token_ids == (VOCAB["<s>"], *ids("0+1="))


def test_a_text_that_was_rendered_before_begins_once(tokenizer: PreTrainedTokenizerFast, write_jsonl: Write) -> None:
    dataset = load_prompts(plain(write_jsonl([{"question": "<s><|user|>1+1?<|assistant|>", "answer": "2"}])), tokenizer)
    rendered = (VOCAB["<s>"], VOCAB["<|user|>"], *ids("1+1?"), VOCAB["<|assistant|>"])
    assert dataset.prompts[0].token_ids == rendered


def test_chat_messages_may_be_written_as_a_text_of_json(tokenizer: PreTrainedTokenizerFast, write_jsonl: Write) -> None:
    messages = json.dumps([{"role": "user", "content": "1+1?"}])
    texts = [messages, "[1, 2] is a list", "[]", "[1, 2]", '[{"a": 1}]', "[" * 10_000]
    path = write_jsonl([{"question": text, "answer": "2"} for text in texts])
    prompts = load_prompts(plain(path, max_length=20_000), tokenizer).prompts
    assert [prompt.text for prompt in prompts] == ["<|user|>1+1?<|assistant|>", *texts[1:]]
    assert load_prompts(plain(path, apply_chat_template=False), tokenizer).prompts[0].text == messages


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_chat_messages_are_rendered_from_both_formats(
    tokenizer: PreTrainedTokenizerFast, write_jsonl: Write, tmp_path: Path, suffix: str
) -> None:
    path = str(tmp_path / "data.parquet")
    if suffix == "jsonl":
        path = write_jsonl(CHAT)
    else:
        pq.write_table(pa.Table.from_pylist(CHAT), path)
    dataset = load_prompts(DatasetConfig(path=path), tokenizer)
    prompt = dataset.prompts[2]
    assert prompt.text == "<|user|>2+1?<|assistant|>"
    assert prompt.token_ids == (VOCAB["<|user|>"], *ids("2+1?"), VOCAB["<|assistant|>"])
    assert (prompt.ground_truth, prompt.data_source, prompt.extra_info) == ("3", "sums", {"index": 2})


def test_a_message_key_that_parquet_fills_with_none_is_not_rendered(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": "a", "name": "Bo"}], "answer": "x"},
        {"prompt": [{"role": "user", "content": "b"}], "answer": "y"},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data.parquet")
    dataset = load_prompts(DatasetConfig(path=str(tmp_path / "data.parquet"), answer_key="answer"), tokenizer)
    assert [prompt.text for prompt in dataset.prompts] == ["<|user|>a[Bo]<|assistant|>", "<|user|>b<|assistant|>"]


def test_a_text_is_rendered_as_chat_on_request(tokenizer: PreTrainedTokenizerFast, write_jsonl: Write) -> None:
    dataset = load_prompts(plain(write_jsonl(PLAIN), apply_chat_template=True), tokenizer)
    assert dataset.prompts[0].text == "<|user|>0+1=<|assistant|>"


def test_a_folder_is_read_in_the_order_of_names_up_to_the_limit(write_jsonl: Write) -> None:
    write_jsonl(PLAIN[3:], "set/b.jsonl")
    folder = Path(write_jsonl(PLAIN[:3], "set/a.jsonl")).parent
    (folder / "README.md").write_text("not data")
    assert load_rows(plain(str(folder))) == PLAIN
    assert load_rows(plain(str(folder), limit=4)) == PLAIN[:4]


def test_json_and_csv_files_of_a_folder_count_if_there_are_no_others(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text('[{"question": "b", "answer": "2"}]')
    assert load_rows(plain(str(tmp_path))) == [{"question": "b", "answer": "2"}]
    (tmp_path / "part-0.jsonl").write_text('{"question": "a", "answer": "1"}\n')
    assert load_rows(plain(str(tmp_path))) == [{"question": "a", "answer": "1"}]


def test_of_a_folder_of_splits_only_the_split_is_read(write_jsonl: Write) -> None:
    for name, rows in (
        ("sums_train", PLAIN[:2]),
        ("test-00000-of-00002", PLAIN[2:3]),
        ("test-00001-of-00002", PLAIN[3:]),
    ):
        folder = str(Path(write_jsonl(rows, f"set/{name}.jsonl")).parent)
    assert load_rows(plain(folder)) == load_rows(plain(folder, split="train")) == PLAIN[:2]
    assert load_rows(plain(folder, split="test")) == PLAIN[2:]
    with pytest.raises(ValueError, match=r"has the split 'dev' in its name; there are sums_train.jsonl, test-00000-of"):
        load_rows(plain(folder, split="dev"))


def test_a_split_that_no_file_is_named_after_is_refused(write_jsonl: Write) -> None:
    file = write_jsonl(PLAIN, "set/part-0.jsonl")
    for path, message in (
        (file, "is one file, which has no split 'test'"),
        (str(Path(file).parent), "has the split 'test' in its name"),
        ("package:arithmetic/train", "is one file, which has no split 'test'"),
    ):
        with pytest.raises(ValueError, match=message):
            load_rows(plain(path, split="test"))
    assert len(load_rows(plain("package:arithmetic", split="test"))) == 512


def test_long_prompts_are_dropped_and_counted(tokenizer: PreTrainedTokenizerFast, write_jsonl: Write) -> None:
    rows = [{"question": "x" * n, "answer": str(n)} for n in (1, 9, 2, 8, 3)]
    dataset = load_prompts(plain(write_jsonl(rows), max_length=4), tokenizer)  # <s> counts
    assert [(prompt.index, prompt.ground_truth) for prompt in dataset.prompts] == [(0, "1"), (1, "2"), (2, "3")]
    assert (dataset.n_rows, dataset.n_too_long, len(dataset)) == (5, 2, 3)


def test_an_unknown_package_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match=r"no data set package:nothing \(split 'train'\) ships with Fivefold; there are \["
    ):
        load_rows(DatasetConfig(path="package:nothing"))


def test_a_name_is_loaded_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []

    def load_dataset(name: str, configuration: str | None, *, split: str) -> datasets.Dataset:
        asked.append((name, configuration, split))
        if name == "no/such":
            raise datasets.exceptions.DatasetNotFoundError("Dataset 'no/such' doesn't exist on the Hub")
        if name == "far/away":
            raise ConnectionError("Couldn't reach 'far/away' on the Hub")
        return datasets.Dataset.from_list(PLAIN)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_rows(plain("openai/gsm8k:main", split="test", limit=2)) == PLAIN[:2]
    assert load_rows(plain("squad")) == PLAIN
    assert asked == [("openai/gsm8k", "main", "test"), ("squad", None, "train")]
    with pytest.raises(ValueError, match=r"'no/such' is no file or folder here, and the Hugging Face hub"):
        load_rows(plain("no/such"))
    with pytest.raises(ValueError, match=r"https?://\S+ could not be reached .*: download it, and give") as told:
        load_rows(plain("far/away"))
    # `fivefold data` reads hubs too.
    assert "train_dataset" not in str(told.value)


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([], {}, "has no rows"),
        (
            [{"question": "a", "answer": "b"}],
            {"prompt_key": "prompt"},
            r"no column 'prompt', which prompt_key.*\['answer', 'question'\]",
        ),
        (
            [{"question": "a"}],
            {},
            r"no column 'answer', which answer_key asks for; the columns found are \['question'\]",
        ),
        (
            [{"question": "a", "answer": "b"}] * 2 + [{"question": "a"}],
            {},
            "row 3 of .* has no column 'answer', which answer_key asks for; 2 of 3 rows have it: fill it in the others",
        ),
        ([{"question": "a"}], {"answer_key": None}, r"no reward_model.ground_truth; its columns are \['question'\]"),
        ([{"question": "a" * 9, "answer": "b"}], {"max_length": 5}, "all 1 prompts .* more than max_length=5 tokens"),
        (
            [PLAIN[0], {"question": "a\ud800", "answer": "b"}],
            {},
            r"row 2 of .*character 2 of a text is '\\ud800', half",
        ),
        (
            [{"question": [{"role": "user", "content": "\ud800"}], "answer": "b"}],
            {},
            r"row 1 of .*character \d+ of a text is '\\ud800'",
        ),
        *(
            ([PLAIN[0], {**PLAIN[1], column: value}], {}, f"row 2 of .* the column '{column}' must hold {wanted}, not")
            for column, value, wanted in [
                ("extra_info", '{"index": 1}', "an object of keys and values"),
                ("extra_info", [], "an object of keys and values"),
                ("data_source", 3, "a text"),
                ("data_source", ["sums"], "a text"),
            ]
        ),
        *(
            ([PLAIN[0], {"question": [message], "answer": "b"}], {}, f"row 2 of .*{problem}")
            for message, problem in [
                ({"from": "human", "value": "Hi"}, r"has no role \(ShareGPT's `from` and `value`"),
                ({"content": "Hi"}, "has no role: give each message"),
                ({"role": "user", "text": "Hi"}, "is no text: give a text"),
                ({"role": "user", "content": None}, "is no text: give a text"),
                ({"role": "user", "content": []}, "is no text: give a text"),
                ({"role": "user", "content": 3}, "is no text: give a text"),
                ({"role": "user", "content": [{"type": "image", "image": "a.png"}]}, "only texts are read here: drop"),
                (
                    {"role": "assistant", "content": "<think>"},
                    "ends with an answer, '<think>', .*continue_final_message",
                ),
            ]
        ),
        ([{"question": [], "answer": "b"}], {}, r"must be a text or a list of chat messages, not \[\]"),
        ([{"question": [{"role": "user", "content": "a"}], "answer": "b"}], {"apply_chat_template": False}, "is false"),
    ],
)
def test_data_that_cannot_be_used_are_refused(
    tokenizer: PreTrainedTokenizerFast,
    write_jsonl: Write,
    rows: list[dict[str, Any]],
    options: dict[str, Any],
    message: str,
) -> None:
    config = DatasetConfig(path=write_jsonl(rows), **({"prompt_key": "question", "answer_key": "answer"} | options))
    with pytest.raises(ValueError, match=message):
        load_prompts(config, tokenizer)


def test_the_text_parts_of_a_message_are_joined(tokenizer: PreTrainedTokenizerFast, write_jsonl: Write) -> None:
    parts = [{"type": "text", "text": "a"}, {"text": "b"}, "c"]
    rows = [{"question": [{"role": "user", "content": content}], "answer": "1"} for content in ("abc", parts)]
    whole, joined = load_prompts(plain(write_jsonl(rows)), tokenizer).prompts
    assert joined.text == whole.text


def test_a_chat_that_ends_with_the_beginning_of_an_answer_is_continued(
    tokenizer: PreTrainedTokenizerFast, write_jsonl: Write
) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    dataset = load_prompts(
        plain(write_jsonl([{"question": chat, "answer": "1"}]), continue_final_message=True), tokenizer
    )
    assert dataset.prompts[0].text == "<|user|>a<|assistant|>b"


def test_a_prompt_without_tokens_is_an_error(write_jsonl: Write) -> None:
    with pytest.raises(ValueError, match=r"row 1 of .* has no tokens"):
        load_prompts(plain(write_jsonl([{"question": "", "answer": "1"}])), build_tokenizer("$A"))


def test_chat_messages_need_a_chat_template(write_jsonl: Write) -> None:
    bare = build_tokenizer("$A")
    bare.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        load_prompts(DatasetConfig(path=write_jsonl(CHAT)), bare)


def test_messages_that_the_chat_template_refuses_are_an_error(write_jsonl: Write) -> None:
    strict = build_tokenizer("$A")
    strict.chat_template = "{{ raise_exception('the roles must alternate') }}"
    with pytest.raises(ValueError, match=r"row 1 of .*refuses the messages \(the roles must alternate\)"):
        load_prompts(DatasetConfig(path=write_jsonl(CHAT)), strict)


@pytest.mark.parametrize("path", ["nowhere/train.jsonl", "./missing"])
def test_a_missing_file_is_not_taken_for_a_hub_name(path: str) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        load_rows(DatasetConfig(path=path))


def test_an_empty_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no .jsonl or .parquet or .json or .csv file"):
        load_rows(DatasetConfig(path=str(tmp_path)))


def test_a_data_set_is_another_one_if_its_answers_are(tokenizer: PreTrainedTokenizerFast, write_jsonl: Write) -> None:
    def fingerprint(**changed: Any) -> str:
        return load_prompts(
            DatasetConfig(path=write_jsonl([{**CHAT[0], **changed}, *CHAT[1:]])), tokenizer
        ).fingerprint()

    others = [
        {"reward_model": {"style": "rule", "ground_truth": "7"}},
        {"reward_model": {"style": "rule", "ground_truth": {"inputs": ["1"]}}},
        {"data_source": "products"},
        {"extra_info": {"index": 9}},
    ]
    assert fingerprint() == fingerprint()
    assert len({fingerprint(), *(fingerprint(**other) for other in others)}) == 5
