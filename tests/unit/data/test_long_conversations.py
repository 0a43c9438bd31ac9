"""Long conversations are tokenized in parts, to the tokens and masks that each beginning by itself gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from fivefold.config.schema.data import SFTDatasetConfig
from fivefold.data import sft
from fivefold.data.beginnings import beginnings
from fivefold.data.sft import SFTExample, conversation

WORDS = ["so", "sum", " 12", "  ", "\n", "\n\n", "!", "you", "</think>", "é", "_", "assistant"]
SPECIALS = ["<s>", "</s>", "<|im_start|>"]
WORD = r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETFUL = CHATML.replace(
    "{{ m.content }}",
    "{{ m.content if loop.last or m.role == 'user' else m.content.split('</think>')[-1].lstrip('\n') }}",
)
"""Of an earlier answer, what comes behind its thoughts."""
BRACKETS = (
    "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} </s>{% endif %}{% endfor %}"
)
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""Without a special token, so there is nothing to divide it at."""
TEMPLATES = {"chatml": CHATML, "forgetful": FORGETFUL, "brackets": BRACKETS, "plain": PLAIN}


def trained(tokenizer: Tokenizer, *, normalized: bool = False, lstrip: bool = False) -> PreTrainedTokenizerFast:
    """Return a tokenizer trained on conversations, whose special tokens are looked for as the options say."""
    random = Random(0)
    texts = ["".join(random.choices(WORDS, k=40)) for _ in range(50)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    tokenizer.add_special_tokens([AddedToken(word, normalized=normalized, lstrip=lstrip) for word in SPECIALS])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def bytes_of_words() -> Tokenizer:
    """As Qwen's: what follows a space may decide to which piece it belongs."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WORD), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return tokenizer


def metaspace() -> Tokenizer:
    """As Llama 2's: the first piece of a text has a space in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return tokenizer


def prepending() -> Tokenizer:
    """As older ones of Llama 2: every piece between special tokens has a space in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "bytes": lambda: trained(bytes_of_words()),
    "metaspace": lambda: trained(metaspace()),
    "prepending": lambda: trained(prepending()),
    "special tokens take the space before them": lambda: trained(bytes_of_words(), lstrip=True),
    "special tokens behind the normalizer": lambda: trained(prepending(), normalized=True),
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return TOKENIZERS[request.param]()


def talk(random: Random, n_answers: int) -> list[dict[str, str]]:
    return [
        {"role": role, "content": "".join(random.choices(WORDS, k=random.randrange(12)))}
        for _ in range(n_answers)
        for role in ("user", "assistant")
    ]


def alone(
    text: str,
    token_ids: Sequence[int],
    ends: Sequence[int],
    tokenized: Callable[[str], list[int]],
    tokenizer: PreTrainedTokenizerBase,
) -> Iterator[list[int]]:
    """Tokenize each beginning by itself."""
    return (tokenized(text[:end]) for end in ends)


def examples(messages: list[Any], tokenizer: PreTrainedTokenizerFast, max_length: int = 4096) -> list[SFTExample]:
    config = SFTDatasetConfig(path="unused", batch_size=2, messages_key="talk", max_length=max_length)
    return conversation(messages, config, tokenizer, "row 1", "talk", only_last=False)


@pytest.mark.parametrize("template", TEMPLATES)
def test_tokens_and_masks_are_those_of_each_beginning_by_itself(
    template: str, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer.chat_template = TEMPLATES[template]
    random, several = Random(template), 0
    for _ in range(40):
        messages = talk(random, random.randrange(1, 6))
        mine = examples(messages, tokenizer)
        with monkeypatch.context() as slow:
            slow.setattr(sft, "beginnings", alone)
            assert mine == examples(messages, tokenizer), messages
        several += any(example.earlier for example in mine)
    assert several > 20, "most conversations learn earlier answers"


def test_beginnings_may_end_anywhere(tokenizer: PreTrainedTokenizerFast) -> None:
    def tokenized(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    random = Random(1)
    for _ in range(100):
        text = "".join(random.choices([*WORDS, *SPECIALS], k=random.randrange(20)))
        ends = sorted(random.choices(range(len(text) + 1), k=random.randrange(6)))
        found = list(beginnings(text, tokenized(text), ends, tokenized, tokenizer))
        assert found == [tokenized(text[:end]) for end in ends], (text, ends)


def test_a_tokenizer_whose_parts_depend_on_one_another_gets_each_beginning_as_a_whole() -> None:
    text = "so<s>sum<s>you"
    found = beginnings(text, [len(text)], [5, 9, 12], lambda part: [len(part)], TOKENIZERS["bytes"]())
    assert list(found) == [[5], [9], [12]]


@pytest.mark.parametrize("template", ["chatml", "brackets"])
def test_a_conversation_is_tokenized_a_few_times_however_many_answers_it_has(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = TOKENIZERS["bytes"]()
    tokenizer.chat_template = TEMPLATES[template]
    lengths: list[int] = []

    def counting(text: str, *args: Any, **options: Any) -> list[int]:
        lengths.append(len(text))
        return list(tokenizer(text, add_special_tokens=options["add_special_tokens"])["input_ids"])

    monkeypatch.setattr(sft, "tokenize", counting)
    messages = talk(Random(2), 40)
    [example] = examples(messages, tokenizer)
    assert len(example.earlier) == 39
    whole = len(str(tokenizer.apply_chat_template(messages, tokenize=False)))
    assert sum(lengths) < 6 * whole


def test_a_conversation_that_is_too_long_is_not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = TOKENIZERS["bytes"]()
    tokenizer.chat_template = CHATML
    monkeypatch.setattr(sft, "beginnings", lambda *_: pytest.fail("it is dropped"))
    [example] = examples(talk(Random(3), 10), tokenizer, max_length=20)
    assert example.n_tokens > 20
