"""Examples of supervised fine-tuning: their masks, their lengths and their errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest
from tokenizers import Regex
from tokenizers.normalizers import Prepend
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from fivefold.config.schema.data import SFTDatasetConfig
from fivefold.data.sft import SFTExample, load_sft, sft_columns
from tests.unit.data.conftest import VOCAB, build_tokenizer

Write = Callable[..., str]
ROWS = [{"prompt": "1+1=", "response": "2"}, {"prompt": [{"role": "user", "content": "hi"}], "response": "yo"}]


USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}


def config(path: str, **options: Any) -> SFTDatasetConfig:
    return SFTDatasetConfig(path=path, batch_size=2, shuffle=False, **options)


def test_the_mask_covers_response_and_end_token(tokenizer: PreTrainedTokenizerFast, write_jsonl: Write) -> None:
    dataset = load_sft(config(write_jsonl(ROWS)), tokenizer)
    columns = sft_columns(dataset.sampler(config("unused"), seed=1).next_batch())
    assert columns.lengths_N.tolist() == [7, 7]
    tokens = ["<s>", *"1+1=", "2", "</s>", "<|user|>", *"hi", "<|assistant|>", *"yo", "</s>"]
    assert columns.values["tokens"].tolist() == [VOCAB[token] for token in tokens]
    assert columns.values["mask"].tolist() == [0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 1]


def test_prompts_come_into_a_template(tokenizer: PreTrainedTokenizerFast, write_jsonl: Write) -> None:
    keys = {"prompt_template": "Q {prompt}", "apply_chat_template": True}
    [example] = load_sft(config(write_jsonl(ROWS[:1]), **keys), tokenizer).examples
    tokens = ["<|user|>", *"Q 1+1=", "<|assistant|>"]
    assert list(example.prompt_ids) == [VOCAB[token] for token in tokens]
    with pytest.raises(ValueError, match="prompt_template is for texts"):
        load_sft(config(write_jsonl(ROWS), **keys), tokenizer)


def test_an_input_follows_the_prompt_on_a_new_line(tokenizer: PreTrainedTokenizerFast, write_jsonl: Write) -> None:
    rows = [{"prompt": "Q", "input": given, "response": "2"} for given in ("1+1", "", None)]
    examples = load_sft(config(write_jsonl(rows), input_key="input"), tokenizer).examples
    whole, plain = ([VOCAB[token] for token in ("<s>", *text)] for text in ("Q\n1+1", "Q"))
    assert [list(example.prompt_ids) for example in examples] == [whole, plain, plain]
    with pytest.raises(ValueError, match="input_key is for texts, and 'prompt' holds"):
        load_sft(config(write_jsonl([{**ROWS[1], "input": "1+1"}]), input_key="input"), tokenizer)
    with pytest.raises(ValueError, match="input_key"):
        load_sft(config(write_jsonl(ROWS), input_key="input"), tokenizer)


ENDING = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'assistant' %}</s>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content if loop.last or m.role == 'user' else m.content[-1] }}"
    "{% if m.role == 'assistant' %}</s>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""As Qwen3's, which writes all of a last answer, and of an earlier one what comes behind its thoughts."""
TALK = [
    {"role": "assistant", "content": "0"},
    USER,
    ANSWER,
    USER,
    {"role": "assistant", "content": "z12"},
    USER,
    ANSWER,
]


def learnt(example: SFTExample) -> list[str]:
    """Return the whole text of an example, and each stretch that is learnt."""
    tokens, mask = [*example.prompt_ids, *example.response_ids], example.mask().tolist()
    names = {number: name for name, number in VOCAB.items()}
    runs = groupby(zip(tokens, mask, strict=True), key=lambda pair: pair[1])
    texts = [(is_learnt, "".join(names[token] for token, _ in run)) for is_learnt, run in runs]
    return ["".join(text for _, text in texts), *(text for is_learnt, text in texts if is_learnt)]


def test_all_answers_of_a_conversation_are_learnt(write_jsonl: Write) -> None:
    ending = build_tokenizer("<s> $A")
    ending.chat_template = ENDING
    path = write_jsonl([{"talk": TALK}])
    (example,) = load_sft(config(path, messages_key="talk"), ending).examples
    whole = ending.apply_chat_template(TALK, tokenize=False).removesuffix("\n")
    assert learnt(example) == [whole, "yo</s>", "z12</s>", "yo</s>"]
    assert [*example.prompt_ids, *example.response_ids] == ending(whole, add_special_tokens=False)["input_ids"]
    assert sft_columns([example]).values["mask"].sum() == 3 + 4 + 3
    (last,) = load_sft(config(path, messages_key="talk", mask_history=True), ending).examples
    assert learnt(last) == [whole, "yo</s>"]
    assert last.prompt_ids == example.prompt_ids
    prints = {
        load_sft(config(path, messages_key="talk", mask_history=only), ending).fingerprint() for only in (False, True)
    }
    assert len(prints) == 2


def test_answers_that_a_template_writes_otherwise_later_are_examples_of_their_own(write_jsonl: Write) -> None:
    forgetful = build_tokenizer("<s> $A")
    forgetful.chat_template = FORGETFUL
    path = write_jsonl([{"talk": TALK}, {"talk": [USER, ANSWER]}])
    data = load_sft(config(path, messages_key="talk"), forgetful)
    begin, user = "<|assistant|>", "<|user|>hi"
    first = f"{begin}0</s>\n{user}{begin}yo</s>"
    second = f"{begin}0</s>\n{user}{begin}o</s>\n{user}{begin}z12</s>"
    third = f"{begin}0</s>\n{user}{begin}o</s>\n{user}{begin}2</s>\n{user}{begin}yo</s>"
    wanted = [[first, "yo</s>"], [second, "z12</s>"], [third, "yo</s>"], [f"{user}{begin}yo</s>", "yo</s>"]]
    assert [learnt(example) for example in data.examples] == wanted
    assert data.usage == "2 of 2 rows"
    short = load_sft(config(path, messages_key="talk", max_length=12), forgetful)
    assert (len(short), short.n_too_long) == (1, 1)


def test_the_history_of_a_conversation_may_be_masked_and_of_texts_there_is_none() -> None:
    with pytest.raises(ValueError, match="mask_history=true has no effect without messages_key"):
        config("unused", mask_history=True)


def test_the_last_message_of_a_conversation_is_learnt(tokenizer: PreTrainedTokenizerFast, write_jsonl: Write) -> None:
    rows = [{"talk": json.dumps([USER, ANSWER])}, {"talk": [USER, ANSWER, USER, ANSWER]}]
    options = {"messages_key": "talk", "mask_history": True}
    first, second = load_sft(config(write_jsonl(rows), **options), tokenizer).examples
    assert first.response_ids == second.response_ids == tuple(VOCAB[token] for token in (*"yo", "</s>"))
    assert [VOCAB["<|user|>"] for _ in range(2)] == [id_ for id_ in second.prompt_ids if id_ == VOCAB["<|user|>"]]
    pair = [{"prompt": [USER], "response": [ANSWER]}]
    assert load_sft(config(write_jsonl(pair)), tokenizer).examples == (first,)
    in_json = [{"prompt": "hi", "response": json.dumps([ANSWER])}]
    assert load_sft(config(write_jsonl(in_json)), tokenizer).examples == (first,)
    with pytest.raises(ValueError, match="prompt_key=a has no effect with messages_key=talk"):
        config("unused", messages_key="talk", prompt_key="a")
    whole = config(
        "unused", messages_key="talk"
    )  # a run writes all keys to its recipe.yaml, from which it starts again
    assert SFTDatasetConfig.model_validate(whole.model_dump()) == whole


@pytest.mark.parametrize("response", ["yo", " yo", ""])
def test_a_response_has_the_tokens_that_it_has_behind_its_prompt(write_jsonl: Write, response: str) -> None:
    """Llama 2's tokenizer puts a space before every text, which the answer to a prompt has not."""
    spacing = build_tokenizer("<s> $A")
    spacing.backend_tokenizer.normalizer = Prepend(" ")
    (example,) = load_sft(config(write_jsonl([{"prompt": "a", "response": response}])), spacing).examples
    assert [*example.prompt_ids, *example.response_ids] == [*spacing("a" + response)["input_ids"], VOCAB["</s>"]]
    assert example.prompt_ids == tuple(VOCAB[token] for token in ("<s>", " ", "a"))
    assert example.response_ids == tuple(VOCAB[token] for token in (*response, "</s>"))


def test_a_response_that_would_share_a_token_with_its_prompt_has_its_own_tokens(write_jsonl: Write) -> None:
    merging = build_tokenizer("<s> $A")
    merging.backend_tokenizer.pre_tokenizer = Split(Regex("=2|."), "isolated")
    (example,) = load_sft(config(write_jsonl(ROWS[:1])), merging).examples
    assert example.prompt_ids == tuple(VOCAB[token] for token in ("<s>", *"1+1="))
    assert example.response_ids == (VOCAB["2"], VOCAB["</s>"])


def test_a_response_that_has_its_end_token_gets_no_second_one(
    tokenizer: PreTrainedTokenizerFast, write_jsonl: Write
) -> None:
    rows = [{"prompt": "a", "response": text} for text in ("yo", "yo</s>")]
    first, second = load_sft(config(write_jsonl(rows)), tokenizer).examples
    assert first == second


def test_examples_too_long_with_their_response_are_dropped_and_counted(
    tokenizer: PreTrainedTokenizerFast, write_jsonl: Write
) -> None:
    rows = [{"prompt": "ab", "response": "c" * n} for n in (1, 2, 3, 4)]  # 4 + n tokens
    dataset = load_sft(config(write_jsonl(rows), max_length=6), tokenizer)
    assert (len(dataset), dataset.n_rows, dataset.n_too_long) == (2, 4, 2)
    assert dataset.usage == "2 of 4 rows, 2 too long"
    with pytest.raises(ValueError, match=r"all 4 examples .* more than max_length=4 tokens"):
        load_sft(config(write_jsonl(rows), max_length=4), tokenizer)


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (
            [{"prompt": "a"}],
            {},
            r"no column 'response', which response_key asks for; the columns found are \['prompt'\]",
        ),
        ([{"prompt": "a", "response": 3}], {}, "'response' must be a text or a list of chat messages, not 3"),
        (
            [{"prompt": "a", "response": ["2"]}],
            {},
            r"'response' must be a text or a list of chat messages, not \['2'\]",
        ),
        ([{"prompt": "a", "response": []}], {}, r"'response' must be a text or a list of chat messages, not \[\]"),
        ([{"talk": [USER]}], {"messages_key": "talk"}, "'talk' must be a list of chat messages that ends with one of"),
        ([{"talk": [USER, USER]}], {"messages_key": "talk"}, "ends with one of the assistant"),
        (ROWS, {"answer_key": "response"}, "answer_key='response' has no use"),
    ],
)
def test_data_that_cannot_be_used_are_refused(
    tokenizer: PreTrainedTokenizerFast,
    write_jsonl: Write,
    rows: list[dict[str, Any]],
    options: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        load_sft(config(write_jsonl(rows), **options), tokenizer)


def test_an_end_token_is_required(write_jsonl: Write) -> None:
    bare = build_tokenizer("$A")
    bare.eos_token = None
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        load_sft(config(write_jsonl(ROWS)), bare)


def test_the_fingerprint_depends_on_the_tokens_and_their_order(
    tokenizer: PreTrainedTokenizerFast, write_jsonl: Write
) -> None:
    moved = [{"prompt": "1+1=2", "response": ""}, ROWS[1]]
    prints = {load_sft(config(write_jsonl(rows)), tokenizer).fingerprint() for rows in (ROWS, moved, ROWS[::-1], ROWS)}
    assert len(prints) == 3
