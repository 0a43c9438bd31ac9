"""Reads prompts with the responses to learn: from rows to tokenized examples, and to columns.

{"prompt": "17 + 25 =", "response": " 42"}      or      {"messages": [..., {"role": "assistant", "content": "42"}]}
tokens   17 + 25 =  42 <eos>
mask      0 0  0 0   1   1
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fivefold.config.schema.data import RowsConfig, SFTRowsConfig
from fivefold.data.examples import Examples, require_examples
from fivefold.data.files import Row
from fivefold.data.prompts import read_messages, render, render_chat
from fivefold.data.rows import load_rows, require_column
from fivefold.data.tokens import tokenize
from fivefold.types import Columns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class SFTExample:
    """One tokenized prompt and the response to learn."""

    prompt_ids: tuple[int, ...]
    """Tokens of the prompt."""
    response_ids: tuple[int, ...]
    """Tokens of the response, and the end-of-sequence token."""

    @property
    def n_tokens(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt_ids) + len(self.response_ids)

    def parts(self) -> Iterator[tuple[int, ...]]:
        """Yield the tokens of the prompt, and those of the response."""
        yield self.prompt_ids
        yield self.response_ids


def load_sft(config: SFTRowsConfig, tokenizer: PreTrainedTokenizerBase) -> Examples[SFTExample]:
    """Read and tokenize a data set of prompts and responses; examples that are too long are dropped and counted.

    The prompt is rendered as in reinforcement learning, with its chat template. A response that is a text follows it
    unchanged, and chat messages as the template writes them.

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
    keys = ("prompt_key", "response_key") if config.messages_key is None else ("messages_key",)
    for key in keys:
        require_column(rows, getattr(config, key), key, config.path)
    examples: list[SFTExample] = []
    for number, row in enumerate(rows, start=1):
        where = f"row {number} of {config.path!r}"
        prompt, response = _parts(row, config, where)
        answers = Answers(prompt, config, tokenizer, where, as_chat=is_chat(response))
        example = answers.tokenized(response, config.messages_key or config.response_key)
        if example.n_tokens <= config.max_length:
            examples.append(example)
    require_examples(examples, len(rows), config.path, config.max_length)
    return Examples(tuple(examples), n_rows=len(rows), n_too_long=len(rows) - len(examples))


def _parts(row: Row, config: SFTRowsConfig, where: str) -> tuple[Any, Any]:
    """Return the prompt and the response of a row.

    Raises:
        ValueError: a conversation that does not end with an answer.
    """
    if config.messages_key is None:
        return row[config.prompt_key], read_answer(row[config.response_key], config)
    messages = read_messages(row[config.messages_key])
    last = messages[-1] if isinstance(messages, list) and len(messages) > 1 else None
    if not isinstance(last, Mapping) or last.get("role") != "assistant":
        raise ValueError(
            f"{where}: {config.messages_key!r} must be a list of chat messages that ends with one of the assistant, "
            f"not {messages!r:.200}"
        )
    return messages[:-1], messages[-1:]


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
        self._messages = [{"role": "user", "content": prompt}] if as_chat and isinstance(prompt, str) else prompt
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

    def _behind_prompt(self, text: str) -> list[int]:
        """Return the tokens of an answer as they are behind the prompt.

        They may differ from those of the text alone, to which tokenizers such as Llama 2's add a space in front. If the
        end of the prompt and the beginning of the answer would become one token, they are those of the text alone.
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


def sft_columns(examples: Sequence[SFTExample]) -> Columns:
    """Lay examples end to end as the columns `tokens` and `mask`, which is true on responses and their end tokens."""
    lengths = [(len(example.prompt_ids), len(example.response_ids)) for example in examples]
    tokens = [token for example in examples for token in (*example.prompt_ids, *example.response_ids)]
    mask_T = np.repeat([False, True] * len(examples), [n for pair in lengths for n in pair])
    return Columns(
        np.array([sum(pair) for pair in lengths], dtype=np.int32),
        {"tokens": np.array(tokens, dtype=np.int32), "mask": mask_T},
    )
