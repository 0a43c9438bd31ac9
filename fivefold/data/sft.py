"""Reads prompts with the responses to learn: from rows to tokenized examples, and to columns.

{"prompt": "17 + 25 =", "response": " 42"}
tokens   17 + 25 =  42 <eos>
mask      0 0  0 0   1   1
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fivefold.config.schema import BatchesConfig, SFTRowsConfig
from fivefold.data.prompts import render
from fivefold.data.rows import load_rows, require_column, usage
from fivefold.data.sampler import EpochSampler
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


@dataclass(frozen=True)
class SFTDataset:
    """The examples that are short enough, and the number of those that are not."""

    examples: tuple[SFTExample, ...]
    n_rows: int
    """Number of rows that were read."""
    n_too_long: int
    """Number of rows that were dropped because prompt, response and end token are more than `max_length` tokens."""

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def usage(self) -> str:
        """The number of rows used, read and too long, as a text for the user."""
        return usage(len(self), self.n_rows, self.n_too_long)

    def sampler(self, config: BatchesConfig, seed: int) -> EpochSampler[SFTExample]:
        """Return a sampler of lists of `config.batch_size` examples; `sft_columns` lays such a list end to end."""
        return EpochSampler(
            self.examples,
            batch_size=config.batch_size,
            shuffle=config.shuffle,
            seed=seed,
            fingerprint=self.fingerprint(),
        )

    def fingerprint(self) -> str:
        """Return a hash of all tokens in their order, by which a resumed run recognises the data set."""
        digest = hashlib.sha256()
        for example in self.examples:
            for ids in (example.prompt_ids, example.response_ids):
                digest.update(struct.pack(f"<{len(ids) + 1}q", len(ids), *ids))
        return digest.hexdigest()[:16]


def load_sft(config: SFTRowsConfig, tokenizer: PreTrainedTokenizerBase) -> SFTDataset:
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
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer of {tokenizer.name_or_path!r} has no end-of-sequence token: set its eos_token")
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
        response_ids = (*learned, tokenizer.eos_token_id)
        if len(prompt_ids) + len(response_ids) <= config.max_length:
            examples.append(SFTExample(prompt_ids, response_ids))
    if not examples:
        raise ValueError(
            f"all {len(rows)} examples of {config.path!r} have more than max_length={config.max_length} tokens: "
            "raise max_length"
        )
    return SFTDataset(tuple(examples), n_rows=len(rows), n_too_long=len(rows) - len(examples))


def sft_columns(examples: Sequence[SFTExample]) -> Columns:
    """Lay examples end to end as the columns `tokens` and `mask`, which is true on responses and their end tokens."""
    lengths = [(len(example.prompt_ids), len(example.response_ids)) for example in examples]
    tokens = [token for example in examples for token in (*example.prompt_ids, *example.response_ids)]
    mask_T = np.repeat([False, True] * len(examples), [n for pair in lengths for n in pair])
    return Columns(
        np.array([sum(pair) for pair in lengths], dtype=np.int32),
        {"tokens": np.array(tokens, dtype=np.int32), "mask": mask_T},
    )
