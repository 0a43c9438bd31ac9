"""Reads the prompts of a data set: from its rows to tokenized prompts with their ground truths.

Rows have one of two forms. The common schema of verifiable rewards:

    {"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "..."}], "ability": "math",
     "reward_model": {"style": "rule", "ground_truth": "72"}, "extra_info": {...}}

and plain columns, which `prompt_key` and `answer_key` name:

    {"question": "17 + 25 =", "answer": "42"}
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from fivefold.config.schema.data import PROMPT, AskedRowsConfig, DatasetConfig, PromptRowsConfig, RowsConfig
from fivefold.data.chats import read_messages, render_chat, with_system
from fivefold.data.files import Row
from fivefold.data.rows import drawn_apart, fingerprint, load_rows, require_column, usage
from fivefold.data.sampler import EpochSampler
from fivefold.data.samplers import build_sampler
from fivefold.data.tokens import tokenize
from fivefold.data.weighted_sampler import WeightedSampler
from fivefold.types import ImagePart, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fivefold.data.images import PromptImages
    from fivefold.families.shape import ModelShape


Value = TypeVar("Value", str, dict[str, Any])


@dataclass(frozen=True)
class PromptDataset:
    """The prompts that are short enough, and the number of those that are not."""

    prompts: tuple[Prompt, ...]
    n_rows: int
    """Number of rows that were read."""
    n_too_long: int
    """Number of rows that were dropped because their prompt has more than `max_length` tokens."""
    placeholders: tuple[int, ...] = ()
    """Tokens that stand for images, which no completion may have."""

    def __len__(self) -> int:
        return len(self.prompts)

    @classmethod
    def joined(cls, sets: Sequence[PromptDataset]) -> PromptDataset:
        """Return the prompts of several sets, one after the other, numbered through."""
        prompts = (prompt for each in sets for prompt in each.prompts)
        numbered = tuple(replace(prompt, index=index) for index, prompt in enumerate(prompts))
        placeholders = dict.fromkeys(token for each in sets for token in each.placeholders)
        n_rows, n_too_long = (sum(getattr(each, name) for each in sets) for name in ("n_rows", "n_too_long"))
        return cls(numbered, n_rows, n_too_long, tuple(placeholders))

    def held_apart(self, hold_out: float, seed: int) -> tuple[PromptDataset, PromptDataset]:
        """Return the prompts to train on, and those that `train_dataset.hold_out` holds out, drawn by `seed`.

        Raises:
            ValueError: there is one prompt alone, or all are held out.
        """
        chosen = drawn_apart(len(self), hold_out, seed)
        n = len(chosen)
        kept, held = (
            [prompt for index, prompt in enumerate(self.prompts) if (index in chosen) is is_held]
            for is_held in (False, True)
        )
        of_kept = replace(self, prompts=tuple(kept), n_rows=self.n_rows - n)
        of_held = replace(self, prompts=tuple(held), n_rows=n, n_too_long=0)
        return PromptDataset.joined([of_kept]), PromptDataset.joined([of_held])

    @property
    def usage(self) -> str:
        """The number of rows used, read and too long, as a text for the user."""
        return usage(len(self), self.n_rows, self.n_too_long)

    @cached_property
    def sources(self) -> frozenset[str]:
        """The data sources of the prompts."""
        return frozenset(prompt.data_source for prompt in self.prompts)

    def sampler(self, config: DatasetConfig, seed: int) -> EpochSampler[Prompt]:
        """Return a sampler of batches of `config.batch_size` prompts.

        Raises:
            ValueError: fewer prompts than a batch has, weights of data sources that do not fit the prompts, or a
                sampler that cannot be made.
        """
        if config.sampler != "epochs":
            return build_sampler(self.prompts, config, seed, self.fingerprint())
        if config.source_weights:
            return WeightedSampler(
                self.prompts,
                [prompt.data_source for prompt in self.prompts],
                config.source_weights,
                batch_size=config.batch_size,
                shuffle=config.shuffle,
                seed=seed,
                fingerprint=self.fingerprint(),
            )
        return EpochSampler(
            self.prompts,
            batch_size=config.batch_size,
            shuffle=config.shuffle,
            seed=seed,
            fingerprint=self.fingerprint(),
        )

    def fingerprint(self) -> str:
        """Return a hash of all prompts and what rewards know of them, by which a resumed run recognises the data."""
        return fingerprint((prompt.key for prompt in self.prompts), map(_judged_by, self.prompts))


def _judged_by(prompt: Prompt) -> str:
    """Return what rewards know of a prompt besides its text, as a text."""
    return json.dumps([prompt.ground_truth, prompt.data_source, prompt.extra_info], sort_keys=True, default=str)


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt as the model sees it."""

    text: str
    token_ids: tuple[int, ...]
    has_special_tokens: bool
    """Whether `text` itself has the special tokens, which the tokenizer otherwise puts around it."""
    messages: tuple[Mapping[str, Any], ...] | None = None
    """The chat messages that the template has rendered; None: it was a text."""
    images: tuple[ImagePart, ...] = ()
    """The images among its tokens; `text` names each in its place."""


def load_prompts(
    config: PromptRowsConfig, tokenizer: PreTrainedTokenizerBase, model: tuple[str, ModelShape] | None = None
) -> PromptDataset:
    """Read, render and tokenize a data set; prompts that are too long are dropped and counted, or cut.

    Args:
        config: the section of the data set.
        tokenizer: the model's tokenizer.
        model: folder or hub name of the model, and its shape, for which images are read.

    Raises:
        ValueError: no data, a missing column, a ground truth that is null or of a type that JSON does not have, chat
            messages without a chat template, no prompt that is short enough, or one that is too long and may not be.
    """
    rows = load_rows(config)
    require_column(rows, config.prompt_key, "prompt_key", config.path)
    if config.answer_key is not None:
        require_column(rows, config.answer_key, "answer_key", config.path)
    reader = image_reader(config, rows, tokenizer, model)
    prompts: list[Prompt] = []
    # A prompt that loses its first tokens is read to its end.
    at_most = None if config.truncation == "left" else config.max_length
    for number, row in enumerate(rows, start=1):
        where = f"row {number} of {config.path!r}"
        prompt = asked(row[config.prompt_key], config, where)
        if reader is None:
            rendered = render(prompt, config, tokenizer, where, at_most)
        else:
            rendered = reader.rendered(prompt, row, where)
        if len(rendered.token_ids) > config.max_length:
            rendered = _cut(rendered, config, tokenizer, where)
        if len(rendered.token_ids) <= config.max_length:
            prompts.append(
                Prompt(
                    index=len(prompts),
                    text=rendered.text,
                    token_ids=rendered.token_ids,
                    ground_truth=_ground_truth(row, config, where),
                    data_source=_typed(row, "data_source", "", where),
                    extra_info=_typed(row, "extra_info", {}, where),
                    messages=rendered.messages,
                    images=rendered.images,
                )
            )
    if not prompts:
        raise ValueError(
            f"all {len(rows)} prompts of {config.path!r} have more than max_length={config.max_length} tokens: "
            "raise max_length"
        )
    placeholders = () if reader is None else (reader.vision.image_token, reader.vision.video_token)
    return PromptDataset(tuple(prompts), len(rows), len(rows) - len(prompts), placeholders)


def image_reader(
    config: RowsConfig, rows: list[Row], tokenizer: PreTrainedTokenizerBase, model: tuple[str, ModelShape] | None
) -> PromptImages | None:
    """Return what reads the images of a data set's rows; None: they have none.

    Raises:
        ValueError: a missing column, or a model that cannot see them.
    """
    if config.image_key is None:
        return None
    from fivefold.data.images import PromptImages  # by those whose prompts have images

    require_column(rows, config.image_key, "image_key", config.path)
    assert model is not None, "images are read for a model"
    return PromptImages.of(config, tokenizer, *model)


def asked(prompt: Any, config: AskedRowsConfig, where: str) -> Any:
    """Return a prompt in the recipe's `prompt_template`, if there is one.

    Raises:
        ValueError: there is one, and the prompt is no text.
    """
    if config.prompt_template is None:
        return prompt
    if config.apply_chat_template is not False:
        prompt = read_messages(prompt)
    if not isinstance(prompt, str):
        raise ValueError(
            f"{where}: prompt_template is for texts, and {config.prompt_key!r} holds {prompt!r:.80}: drop it, or give "
            "texts"
        )
    return config.prompt_template.replace(PROMPT, prompt)


def _cut(
    rendered: RenderedPrompt, config: PromptRowsConfig, tokenizer: PreTrainedTokenizerBase, where: str
) -> RenderedPrompt:
    """Return a prompt with more than `max_length` tokens as `truncation` says; one to drop stays as it is."""
    most = config.max_length
    match config.truncation:
        case "error":
            raise ValueError(
                f"{where}: the prompt has more than max_length={most} tokens, and truncation is error: raise "
                "max_length, drop the row, or set truncation to drop, left or right"
            )
        case "drop":
            return rendered
        case side:
            kept = rendered.token_ids[-most:] if side == "left" else rendered.token_ids[:most]
            return replace(rendered, text=str(tokenizer.decode(list(kept))), token_ids=kept)


def render(
    prompt: Any, config: RowsConfig, tokenizer: PreTrainedTokenizerBase, where: str, at_most: int | None = None
) -> RenderedPrompt:
    """Return a prompt as the model sees it, and its tokens.

    Args:
        prompt: a text, or a list of chat messages, which may be written as a text of JSON.
        config: `apply_chat_template` None renders messages and leaves texts as they are; True renders a text too, as a
            single message of a user; False allows texts only, and takes messages in JSON for one. `system_prompt`
            begins each chat.
        tokenizer: the model's tokenizer.
        where: the row, for error messages.
        at_most: number of tokens beyond which the prompt is too long. Of a prompt with far more, only the beginning is
            tokenized, which is still too long. None: there is no limit.

    Raises:
        ValueError: a prompt that is neither text nor messages, that has no tokens, that is no Unicode text, or that
            needs a chat template where the tokenizer has none.
    """
    prompt = prompt if config.apply_chat_template is False else read_messages(prompt)
    is_chat = not isinstance(prompt, str)
    if is_chat and not (isinstance(prompt, list) and prompt and all(isinstance(m, Mapping) for m in prompt)):
        raise ValueError(
            f"{where}: {config.prompt_key!r} must be a text or a list of chat messages, not {prompt!r:.200}"
        )
    if is_chat and config.apply_chat_template is False:
        raise ValueError(
            f"{where}: {config.prompt_key!r} holds chat messages, but apply_chat_template is false: "
            "leave it out, or give texts"
        )
    messages: Sequence[Mapping[str, Any]] | None = None
    if is_chat or config.apply_chat_template:
        messages = with_system(prompt if is_chat else [{"role": "user", "content": prompt}], config)
        has_begun = messages[-1].get("role") == "assistant"
        if has_begun and not config.continue_final_message:
            raise ValueError(
                f"{where}: the chat ends with an answer, {messages[-1].get('content')!r:.80}, behind which the "
                "template would begin another one: set continue_final_message=true to let the model continue it, or "
                "drop the message"
            )
        text = render_chat(messages, tokenizer, where, continues=has_begun)
        has_special_tokens = True  # the chat template writes them
    elif config.system_prompt is not None:
        raise ValueError(
            f"{where}: system_prompt begins chats, and {config.prompt_key!r} holds a text: set "
            "apply_chat_template=true, or write it into the texts"
        )
    else:
        text = prompt
        # A text that was rendered before has its special tokens; the tokenizer would put a second one in front.
        has_special_tokens = bool(tokenizer.bos_token) and text.startswith(str(tokenizer.bos_token))
    token_ids = tokenize(text, tokenizer, add_special_tokens=not has_special_tokens, at_most=at_most, where=where)
    if not has_special_tokens and token_ids[-1:] == [tokenizer.eos_token_id]:
        # Some tokenizers end every text with the end token, after which no completion must start.
        token_ids = token_ids if text.endswith(str(tokenizer.eos_token)) else token_ids[:-1]
    if not token_ids:
        raise ValueError(f"{where}: {config.prompt_key!r} has no tokens; a prompt needs at least one")
    return RenderedPrompt(text, tuple(token_ids), has_special_tokens, None if messages is None else tuple(messages))


def _typed(row: Row, column: str, otherwise: Value, where: str) -> Value:
    """Return the value of a column that has the type of `otherwise`, which stands for a value that is missing or null.

    Raises:
        ValueError: it has another type.
    """
    value = row.get(column)
    if value is None:
        return otherwise
    if not isinstance(value, type(otherwise)):
        wanted = "a text" if isinstance(otherwise, str) else "an object of keys and values"
        raise ValueError(
            f"{where}: the column {column!r} must hold {wanted}, not {value!r:.200}, a {type(value).__name__}: convert "
            "it, or drop the column"
        )
    return value


def _ground_truth(row: Row, config: RowsConfig, where: str) -> Any:
    if config.answer_key is not None:
        return _plain(row[config.answer_key], f"{where}: column {config.answer_key!r}")
    reward_model = row.get("reward_model")
    if not isinstance(reward_model, Mapping) or "ground_truth" not in reward_model:
        raise ValueError(
            f"{where} has no reward_model.ground_truth; its columns are {sorted(row)}: "
            "set answer_key to the column that holds the ground truth"
        )
    return _plain(reward_model["ground_truth"], f"{where}: reward_model.ground_truth")


def _plain(truth: Any, where: str) -> Any:
    """Return `truth` if JSON has its type, because it is compared with texts, and written to the log of samples."""
    if truth is None:
        raise ValueError(f"{where} is null, which no response can be compared with: fill it, or drop the row")
    if isinstance(truth, (str, bool, int)) or (isinstance(truth, float) and math.isfinite(truth)):
        return truth
    if isinstance(truth, list):
        return [_plain(item, f"{where}[{i}]") for i, item in enumerate(truth)]
    if isinstance(truth, dict) and all(isinstance(key, str) for key in truth):
        # Parquet gives all rows of a column the same keys, and the value None to keys that a row does not have.
        return {key: None if item is None else _plain(item, f"{where}.{key}") for key, item in truth.items()}
    raise ValueError(
        f"{where} holds {truth!r}, a {type(truth).__name__}: a ground truth is a text, a finite number, true or false, "
        "or a list or an object of them. Write it as one of those, a date or a decimal as a text for example"
    )
