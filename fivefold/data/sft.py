"""Reads prompts with the responses to learn: from rows to tokenized examples, and to columns.

{"prompt": "17 + 25 =", "response": " 42"}      or      {"messages": [..., {"role": "assistant", "content": "42"}]}
tokens   17 + 25 =  42 <eos>
mask      0 0  0 0   1   1

All answers of the assistant in a conversation are learned. An example ends with one of them, and has all before it that
its chat template writes there as it writes a last answer; the others end separate examples (`conversation`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fivefold.batch import Columns, RowImages
from fivefold.config.schema.data import RowsConfig, SFTRowsConfig
from fivefold.data.beginnings import beginnings
from fivefold.data.chats import read_messages, render_chat, with_system
from fivefold.data.examples import Examples, require_examples
from fivefold.data.files import Row
from fivefold.data.prompts import asked, image_reader, render
from fivefold.data.rows import load_rows, require_column
from fivefold.data.tokens import tokenize
from fivefold.types import ImagePart

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fivefold.data.images import PromptImages
    from fivefold.data.seen_examples import ExampleImages
    from fivefold.families.shape import ModelShape


@dataclass(frozen=True)
class SFTExample:
    """One tokenized prompt and the response to learn."""

    prompt_ids: tuple[int, ...]
    """Tokens of the prompt."""
    response_ids: tuple[int, ...]
    """Tokens of the response, and the end-of-sequence token."""
    earlier: tuple[tuple[int, int], ...] = ()
    """Begin and end of each stretch of the prompt's tokens that is learned too: earlier answers of a conversation."""
    images: tuple[ImagePart, ...] = ()
    """The images among the prompt's tokens, in their order."""

    @property
    def n_tokens(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt_ids) + len(self.response_ids)

    def parts(self) -> Iterator[tuple[int, ...]]:
        """Yield the tokens of the prompt, divided where an earlier answer begins or ends, and the response's.

        Numbers below 0, which no tokens are, stand for images.
        """
        ends = [place for stretch in self.earlier for place in stretch]
        for start, end in zip([0, *ends], [*ends, len(self.prompt_ids)], strict=True):
            if start < end:
                yield self.prompt_ids[start:end]
        yield self.response_ids
        if self.images:
            yield tuple(-1 - image.digest for image in self.images)

    def mask(self) -> npt.NDArray[np.bool_]:
        """Return which tokens are learned."""
        mask_T = np.arange(self.n_tokens) >= len(self.prompt_ids)
        for start, end in self.earlier:
            mask_T[start:end] = True
        return mask_T


def load_sft(
    config: SFTRowsConfig, tokenizer: PreTrainedTokenizerBase, model: tuple[str, ModelShape] | None = None
) -> Examples[SFTExample]:
    """Read and tokenize a data set of prompts and responses; examples that are too long are dropped and counted.

    The prompt is rendered as in reinforcement learning, with its chat template. A response that is a text follows it
    unchanged, and chat messages as the template writes them.

    Each answer of a conversation is learned unless `mask_history` is set; if one of its examples is too long, all are
    dropped.

    Args:
        config: the section of the data set.
        tokenizer: the model's tokenizer.
        model: folder or hub name of the model, and its shape, for which images are read.

    Raises:
        ValueError: no data, a missing column, a response that is neither a text nor messages, a tokenizer without an
            end-of-sequence token, or no example that is short enough.
    """
    if config.answer_key is not None:
        raise ValueError(
            f"answer_key={config.answer_key!r} has no use in supervised fine-tuning: "
            "set response_key, the text to learn"
        )
    end_token(tokenizer)
    rows = load_rows(config)
    own = ("prompt_key", "response_key", *(["input_key"] if config.input_key is not None else []))
    for key in own if config.messages_key is None else ("messages_key",):
        require_column(rows, getattr(config, key), key, config.path)
    reader = image_reader(config, rows, tokenizer, model)
    examples: list[SFTExample] = []
    numbers: list[int] = []
    n_too_long = 0
    for number, row in enumerate(rows, start=1):
        where = f"row {number} of {config.path!r}"
        found = _examples(row, config, tokenizer, where, images_of(row, reader, where))
        if all(example.n_tokens <= config.max_length for example in found):
            examples += found
            numbers += [number] * len(found)
        else:
            n_too_long += 1
    require_examples(examples, len(rows), config.path, config.max_length)
    return Examples(tuple(examples), tuple(numbers), n_rows=len(rows), n_too_long=n_too_long)


def images_of(row: Row, reader: PromptImages | None, where: str) -> ExampleImages | None:
    """Return the images of a row for its examples; None: the data set has none."""
    if reader is None:
        return None
    from fivefold.data.seen_examples import ExampleImages  # by those whose prompts have images

    return ExampleImages.of(reader, row, where)


def _examples(
    row: Row, config: SFTRowsConfig, tokenizer: PreTrainedTokenizerBase, where: str, images: ExampleImages | None
) -> list[SFTExample]:
    """Return the examples of a row: one, or a conversation's."""
    if config.messages_key is not None:
        messages = _messages(row[config.messages_key], config.messages_key, where)
        messages = list(with_system(messages if images is None else images.asked(messages), config))
        made = conversation(messages, config, tokenizer, where, config.messages_key, only_last=config.mask_history)
        return made if images is None else [images.seen(each, is_whole=each is made[-1]) for each in made]
    response = read_answer(row[config.response_key], config)
    prompt = asked(_with_input(row, config, where), config, where)
    return [answered(prompt, response, config.response_key, config, tokenizer, where, images)]


def answered(
    prompt: Any,
    answer: Any,
    key: str,
    config: RowsConfig,
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    images: ExampleImages | None,
) -> SFTExample:
    """Return a prompt with its one answer, which is in the column `key`."""
    marked = prompt if images is None else images.asked(prompt)
    example = Answers(marked, config, tokenizer, where, as_chat=is_chat(answer)).tokenized(answer, key)
    return example if images is None else images.seen(example)


def _with_input(row: Row, config: SFTRowsConfig, where: str) -> Any:
    """Return a row's prompt, with the text of the column `input_key` on a new line, if there is one.

    Raises:
        ValueError: there is one, and it or the prompt is no text.
    """
    prompt = row[config.prompt_key]
    if config.input_key is None or not (given := row[config.input_key]):
        return prompt
    if not isinstance(given, str) or not isinstance(prompt, str):
        raise ValueError(
            f"{where}: input_key is for texts, and {config.prompt_key!r} holds {prompt!r:.80}, {config.input_key!r} "
            f"{given!r:.80}: drop it, or give texts"
        )
    return f"{prompt}\n{given}"


def _messages(value: Any, key: str, where: str) -> list[Any]:
    """Return the messages of a row's column.

    Raises:
        ValueError: a conversation that does not end with an answer.
    """
    messages = read_messages(value)
    last = messages[-1] if isinstance(messages, list) and len(messages) > 1 else None
    if not isinstance(last, Mapping) or last.get("role") != "assistant":
        raise ValueError(
            f"{where}: {key!r} must be a list of chat messages that ends with one of the assistant, "
            f"not {messages!r:.200}"
        )
    return list(messages)


def end_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the end-of-sequence token.

    Raises:
        ValueError: the tokenizer has none.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer of {tokenizer.name_or_path!r} has no end-of-sequence token: set its eos_token")
    return int(tokenizer.eos_token_id)


def read_answer(answer: Any, config: RowsConfig) -> Any:
    """Return the chat messages that an answer holds as a text of JSON, under the rule of prompts; else `answer`."""
    return answer if config.apply_chat_template is False else read_messages(answer)


def is_chat(answer: Any) -> bool:
    """Return whether an answer is a list of chat messages, and not a text."""
    return isinstance(answer, list)


class Answers:
    """Tokenizes the answers to one prompt."""

    def __init__(
        self,
        prompt: Any,
        config: RowsConfig,
        tokenizer: PreTrainedTokenizerBase,
        where: str,
        *,
        as_chat: bool,
    ) -> None:
        """Tokenize the prompt; a text that chat messages answer is the message of a user."""
        prompt = read_messages(prompt) if as_chat else prompt
        messages = [{"role": "user", "content": prompt}] if as_chat and isinstance(prompt, str) else prompt
        has_messages = as_chat and messages and isinstance(messages, list) and isinstance(messages[0], Mapping)
        self._messages = with_system(messages, config) if has_messages else messages
        self._config, self._tokenizer, self._where = config, tokenizer, where
        self._end = end_token(tokenizer)
        self._prompt = render(self._messages, config, tokenizer, where, config.max_length)

    def tokenized(self, answer: Any, key: str) -> SFTExample:
        """Return the prompt with an answer, which one end-of-sequence token ends, also where its text has that."""
        is_messages = is_chat(answer) and answer and all(isinstance(message, Mapping) for message in answer)
        text = self._rendered(answer, key) if is_messages else answer
        if not isinstance(text, str):
            raise ValueError(f"{self._where}: {key!r} must be a text or a list of chat messages, not {answer!r:.200}")
        learned = self._behind_prompt(text)
        is_ended = learned[-1:] == [self._end]
        return SFTExample(self._prompt.token_ids, tuple(learned) if is_ended else (*learned, self._end))

    def learning(self, example: SFTExample, earlier: Sequence[_Earlier]) -> SFTExample:
        """Return an example of this prompt that learns earlier answers, which are in its text, too.

        Tokens do not cross the ends of an answer, as when it is sampled. An example that is too long stays as it is.
        """
        if example.n_tokens > self._config.max_length:
            return example
        text, ids = self._prompt.text, list[int]()
        tokenized = partial(self._tokenized, add_special_tokens=False)
        ends = [end for answer in earlier for end in (answer.start, answer.end)] + [len(text)]
        places: list[int] = []
        wholes = beginnings(text, self._prompt.token_ids, ends, tokenized, self._tokenizer)
        for start, end, whole in zip([0, *ends[:-1]], ends, wholes, strict=True):
            joins = whole[: len(ids)] == ids
            ids = whole if joins else [*ids, *tokenized(text[start:end])]
            places.append(len(ids))
        stretches = tuple(zip(places[0:-1:2], places[1:-1:2], strict=True))
        return SFTExample(tuple(ids), example.response_ids, stretches)

    def holds(self, answer: _Earlier) -> bool:
        """Return whether the prompt's text has an earlier answer as it was when it was the last one."""
        return self._prompt.text.startswith(answer.text)

    def _behind_prompt(self, text: str) -> list[int]:
        """Return the tokens of an answer as they are behind the prompt.

        They may differ from the text's own tokens: tokenizers such as Llama 2's add a space in front of a text. If the
        end of the prompt and the beginning of the answer would become one token, they are the text's own.
        """
        prompt = self._prompt
        whole = self._tokenized(prompt.text + text, add_special_tokens=not prompt.has_special_tokens)
        n = len(prompt.token_ids)
        if tuple(whole[:n]) == prompt.token_ids:
            return whole[n:]
        return self._tokenized(text, add_special_tokens=False)

    def _tokenized(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return tokenize(
            text,
            self._tokenizer,
            add_special_tokens=add_special_tokens,
            at_most=self._config.max_length,
            where=self._where,
        )

    def _rendered(self, answer: list[Any], key: str) -> str:
        """Return the text that an answer's messages add to the prompt's, without the end token behind it."""
        whole = render_chat([*self._messages, *answer], self._tokenizer, self._where, is_prompt=False)
        if not whole.startswith(self._prompt.text):
            raise ValueError(
                f"{self._where}: with {key!r} the chat template of {self._tokenizer.name_or_path!r} writes the "
                "prompt's messages in another way than without, so nothing tells the answer from the prompt: give texts"
            )
        text = whole.removeprefix(self._prompt.text)
        end = str(self._tokenizer.eos_token)
        return text.rstrip().removesuffix(end) if text.rstrip().endswith(end) else text


@dataclass(frozen=True)
class _Earlier:
    """An answer of a conversation that continues after it."""

    text: str
    """The conversation up to the end of the answer, with its end token if the chat template writes one."""
    start: int
    """Character with which the answer begins."""

    @property
    def end(self) -> int:
        return len(self.text)

    @staticmethod
    def of(messages: list[Any], tokenizer: PreTrainedTokenizerBase, where: str) -> _Earlier | None:
        """Return the last message; None if the chat template does not write the others as it does without it."""
        prompt = render_chat(messages[:-1], tokenizer, where)
        text = render_chat(messages, tokenizer, where, is_prompt=False)
        ended = text.rstrip()
        text = ended if ended.endswith(str(tokenizer.eos_token)) else text
        return _Earlier(text, len(prompt)) if text.startswith(prompt) else None


def conversation(
    messages: list[Any],
    config: RowsConfig,
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    key: str,
    *,
    only_last: bool,
) -> list[SFTExample]:
    """Return the examples of a conversation, in the order of the answers that end them.

    Chat templates may write an earlier answer in another way than a last one: Qwen3's drops its thoughts. A model that
    answers sees the earlier ones so, and its own not. So an answer is learned in a later one's example only if that has
    it unchanged, with all before it, and otherwise in an example that ends with it.

    Args:
        messages: the messages. The last is an answer.
        config: how rows are read.
        tokenizer: the model's tokenizer.
        where: the row, for error messages.
        key: the column, for error messages.
        only_last: learn the last answer alone.

    Raises:
        ValueError: messages that the chat template refuses, or an answer that nothing tells from what is before it.
    """
    places = [
        place
        for place, message in enumerate(messages)
        if place > 0 and isinstance(message, Mapping) and message.get("role") == "assistant"
    ]
    left = places[-1:] if only_last else places
    earlier = {place: _Earlier.of(messages[: place + 1], tokenizer, where) for place in left[:-1]}
    examples = []
    while left:
        *before, last = left
        answers = Answers(messages[:last], config, tokenizer, where, as_chat=True)
        example = answers.tokenized(messages[last : last + 1], key)
        found = {place: answer for place in before if (answer := earlier[place]) is not None and answers.holds(answer)}
        examples.append(answers.learning(example, list(found.values())) if found else example)
        left = [place for place in before if place not in found]
    return examples[::-1]


def sft_columns(examples: Sequence[SFTExample]) -> Columns:
    """Lay examples end to end as the columns `tokens` and `mask`, which is true on what is learned."""
    tokens = [token for example in examples for token in (*example.prompt_ids, *example.response_ids)]
    return Columns(
        np.array([example.n_tokens for example in examples], dtype=np.int32),
        {"tokens": np.array(tokens, dtype=np.int32), "mask": np.concatenate([each.mask() for each in examples])},
        images=placed_images(examples),
    )


def placed_images(examples: Sequence[SFTExample]) -> RowImages | None:
    """Return the images of each example, which are read here; None: there are none.

    Raises:
        ValueError: a file that is gone, or that has changed since the data set was read.
    """
    if not any(example.images for example in examples):
        return None
    from fivefold.data.seen_examples import row_images  # by those whose prompts have images

    return row_images(examples)
