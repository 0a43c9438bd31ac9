"""Reads answers that people, or a rule, preferred to others: from rows to tokenized pairs, and to columns.

A row has a prompt and two answers, each a text or a list of chat messages,

    {"prompt": "17 + 25 =", "chosen": " 42", "rejected": " 43"}
    {"prompt": [{"role": "user", ...}], "chosen": [{"role": "assistant", ...}], "rejected": [...]}

or two whole conversations, which begin with the same messages, the prompt:

    {"chosen": [{"role": "user", ...}, {"role": "assistant", ...}], "rejected": [...]}

or, for KTO, one answer with a label:

    {"prompt": "17 + 25 =", "response": " 42", "label": true}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fivefold.batch import Columns
from fivefold.config.schema.data import DPORowsConfig, PreferenceRowsConfig
from fivefold.data.examples import Examples, require_examples
from fivefold.data.files import Row
from fivefold.data.prompts import image_reader
from fivefold.data.rows import load_rows, require_column
from fivefold.data.sft import Answers, SFTExample, answered, images_of, is_chat, placed_images, read_answer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fivefold.data.seen_examples import ExampleImages
    from fivefold.families.shape import ModelShape


_LABELS = {"true": True, "1": True, "false": False, "0": False}
"""What the values of a CSV file, which are texts, say as labels."""


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt."""

    chosen: SFTExample
    """The preferred answer."""
    rejected: SFTExample

    @property
    def n_tokens(self) -> int:
        """Tokens of the longer one of the two sequences."""
        return max(self.chosen.n_tokens, self.rejected.n_tokens)

    def parts(self) -> Iterator[tuple[int, ...]]:
        """Yield the tokens of both."""
        yield from self.chosen.parts()
        yield from self.rejected.parts()


@dataclass(frozen=True)
class Labelled:
    """One answer to a prompt, which is desirable or not."""

    answer: SFTExample
    is_desirable: bool

    @property
    def n_tokens(self) -> int:
        """Tokens of prompt and answer."""
        return self.answer.n_tokens

    def parts(self) -> Iterator[tuple[int, ...]]:
        """Yield the tokens, and the label."""
        yield from self.answer.parts()
        yield (int(self.is_desirable),)


def load_pairs(
    config: PreferenceRowsConfig, tokenizer: PreTrainedTokenizerBase, model: tuple[str, ModelShape] | None = None
) -> Examples[Pair]:
    """Read and tokenize pairs; those with an answer that is too long are dropped and counted.

    Args:
        config: the section of the data set.
        tokenizer: the model's tokenizer.
        model: folder or hub name of the model, and its shape, for which images are read.

    Raises:
        ValueError: no data, a missing column, answers of another form, a tokenizer without an end-of-sequence token, or
            no pair that is short enough.
    """
    _refuse_answers(config)
    rows = load_rows(config)
    for key in ("chosen_key", "rejected_key"):
        require_column(rows, getattr(config, key), key, config.path)
    reader = image_reader(config, rows, tokenizer, model)
    pairs: list[Pair] = []
    numbers: list[int] = []
    for number, row in enumerate(rows, start=1):
        where = f"row {number} of {config.path!r}"
        pair = _pair(row, config, tokenizer, where, images_of(row, reader, where))
        if pair.n_tokens <= config.max_length:
            pairs.append(pair)
            numbers.append(number)
    require_examples(pairs, len(rows), config.path, config.max_length)
    return Examples(tuple(pairs), tuple(numbers), n_rows=len(rows), n_too_long=len(rows) - len(pairs))


def load_labelled(
    config: DPORowsConfig, tokenizer: PreTrainedTokenizerBase, model: tuple[str, ModelShape] | None = None
) -> Examples[Labelled]:
    """Read and tokenize single answers with labels; or pairs, as a desirable and an undesirable answer each.

    The arguments are as in `load_pairs`.

    Raises:
        ValueError: as `load_pairs`, or a label that is not true or false.
    """
    if config.label_key is None:
        pairs = load_pairs(config, tokenizer, model)
        answers = [Labelled(answer, is_chosen) for pair in pairs.examples
                   for answer, is_chosen in ((pair.chosen, True), (pair.rejected, False))]  # fmt: skip
        rows_of = tuple(row for row in pairs.rows for _ in range(2))
        return Examples(tuple(answers), rows_of, pairs.n_rows, pairs.n_too_long)
    _refuse_answers(config)
    rows = load_rows(config)
    for key in ("prompt_key", "response_key", "label_key"):
        require_column(rows, getattr(config, key), key, config.path)
    reader = image_reader(config, rows, tokenizer, model)
    labelled: list[Labelled] = []
    numbers: list[int] = []
    for number, row in enumerate(rows, start=1):
        where = f"row {number} of {config.path!r}"
        is_desirable = _label(row[config.label_key], config.label_key, where)
        prompt, answer = row[config.prompt_key], read_answer(row[config.response_key], config)
        images = images_of(row, reader, where)
        example = answered(prompt, answer, config.response_key, config, tokenizer, where, images)
        if example.n_tokens <= config.max_length:
            labelled.append(Labelled(example, is_desirable))
            numbers.append(number)
    require_examples(labelled, len(rows), config.path, config.max_length)
    return Examples(tuple(labelled), tuple(numbers), n_rows=len(rows), n_too_long=len(rows) - len(labelled))


def _label(label: Any, key: str, where: str) -> bool:
    """Return whether a label says that its answer is desirable."""
    value = _LABELS.get(label.strip().lower()) if isinstance(label, str) else label
    if value not in (0, 1):
        raise ValueError(f"{where}: {key!r} must be true or false, not {label!r:.200}")
    return bool(value)


def score_columns(examples: Sequence[SFTExample]) -> Columns:
    """Lay examples end to end, each with one more token, which alone has the mask: the state before it gets the score.

    A value belongs to the state before a token. The model's score is the value of the state after the last
    token, which is the state before an appended token; nothing depends on which token that is.
    """
    lengths_N = np.array([example.n_tokens + 1 for example in examples], dtype=np.int32)
    tokens = [token for each in examples for token in (*each.prompt_ids, *each.response_ids, each.response_ids[-1])]
    mask_T = np.zeros(len(tokens), dtype=np.bool_)
    mask_T[np.cumsum(lengths_N) - 1] = True
    values = {"tokens": np.array(tokens, dtype=np.int32), "mask": mask_T}
    return Columns(lengths_N, values, images=placed_images(examples))


def _refuse_answers(config: PreferenceRowsConfig) -> None:
    if config.answer_key is not None:
        raise ValueError(
            f"answer_key={config.answer_key!r} has no use in training on preferences: set chosen_key and rejected_key"
        )


def _pair(
    row: Row,
    config: PreferenceRowsConfig,
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    images: ExampleImages | None,
) -> Pair:
    chosen, rejected = (read_answer(row[key], config) for key in (config.chosen_key, config.rejected_key))
    if is_chat(chosen) != is_chat(rejected):
        raise ValueError(
            f"{where}: {config.chosen_key!r} and {config.rejected_key!r} must both be texts, or both lists of messages"
        )
    prompt = row.get(config.prompt_key)
    is_whole, is_other_whole = (is_chat(answer) and _is_conversation(answer) for answer in (chosen, rejected))
    if is_whole != is_other_whole:
        raise ValueError(
            f"{where}: one of {config.chosen_key!r} and {config.rejected_key!r} is a whole conversation, and the other "
            "an answer alone: write both in one form"
        )
    if is_whole:
        if images is not None:
            chosen, rejected = images.asked(chosen), images.asked(rejected)
        n = _n_common(chosen, rejected)
        prompt, chosen, rejected = chosen[:n], chosen[n:], rejected[n:]
        if not prompt or not chosen or not rejected:
            raise ValueError(
                f"{where}: the conversations {config.chosen_key!r} and {config.rejected_key!r} must begin with the "
                "same messages, the prompt, and each must continue with another answer: change them, or drop the row"
            )
    elif prompt is None:
        lacks = (
            f": {config.prompt_key!r} is null" if config.prompt_key in row else f" has no column {config.prompt_key!r}"
        )
        raise ValueError(
            f"{where}{lacks}, which prompt_key asks for unless {config.chosen_key!r} and {config.rejected_key!r} are "
            f"whole conversations; its columns are {sorted(row)}: set prompt_key, or fill the row"
        )
    elif images is not None:
        prompt = images.asked(prompt)
    answers = Answers(prompt, config, tokenizer, where, as_chat=is_chat(chosen))
    pair = answers.tokenized(chosen, config.chosen_key), answers.tokenized(rejected, config.rejected_key)
    return Pair(*(pair if images is None else map(images.seen, pair)))


def _is_conversation(messages: list[Any]) -> bool:
    """Return whether messages begin with a prompt and not with an answer."""
    return bool(messages) and isinstance(messages[0], Mapping) and messages[0].get("role") != "assistant"


def _n_common(one: list[Any], other: list[Any]) -> int:
    """Return the number of messages that both conversations begin with, not counting an answer."""
    n = 0
    while n < min(len(one), len(other)) - 1 and one[n] == other[n]:
        n += 1
    return n
