"""Reads prompts with the responses to learn: from rows to tokenized examples, and to columns.

{"prompt": "17 + 25 =", "response": " 42"}
tokens   17 + 25 =  42 <eos>
mask      0 0  0 0   1   1
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fivefold.config.schema.data import SFTRowsConfig
from fivefold.data.examples import Examples, require_examples
from fivefold.data.prompts import render
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

    The prompt is rendered as in reinforcement learning, with its chat template; the response follows it unchanged.

    Raises:
        ValueError: no data, a missing column, a response that is no text, a tokenizer without an end-of-sequence token,
            or no example that is short enough.
    """
    if config.answer_key is not None:
        raise ValueError(
            f"answer_key={config.answer_key!r} has no use in supervised fine-tuning: "
            "set response_key, the text to learn"
        )
    end = end_token(tokenizer)
    rows = load_rows(config)
    require_column(rows, config.prompt_key, "prompt_key", config.path)
    require_column(rows, config.response_key, "response_key", config.path)
    examples: list[SFTExample] = []
    for number, row in enumerate(rows, start=1):
        where = f"row {number} of {config.path!r}"
        response = row[config.response_key]
        if not isinstance(response, str):
            raise ValueError(f"{where}: {config.response_key!r} must be a text, not {response!r:.200}")
        _, prompt_ids = render(row[config.prompt_key], config, tokenizer, where, config.max_length)
        learned = tokenize(response, tokenizer, add_special_tokens=False, at_most=config.max_length, where=where)
        example = SFTExample(prompt_ids, (*learned, end))
        if example.n_tokens <= config.max_length:
            examples.append(example)
    require_examples(examples, len(rows), config.path, config.max_length)
    return Examples(tuple(examples), n_rows=len(rows), n_too_long=len(rows) - len(examples))


def end_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the end-of-sequence token.

    Raises:
        ValueError: the tokenizer has none.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer of {tokenizer.name_or_path!r} has no end-of-sequence token: set its eos_token")
    return int(tokenizer.eos_token_id)


def sft_columns(examples: Sequence[SFTExample]) -> Columns:
    """Lay examples end to end as the columns `tokens` and `mask`, which is true on responses and their end tokens."""
    lengths = [(len(example.prompt_ids), len(example.response_ids)) for example in examples]
    tokens = [token for example in examples for token in (*example.prompt_ids, *example.response_ids)]
    mask_T = np.repeat([False, True] * len(examples), [n for pair in lengths for n in pair])
    return Columns(
        np.array([sum(pair) for pair in lengths], dtype=np.int32),
        {"tokens": np.array(tokens, dtype=np.int32), "mask": mask_T},
    )
