"""The tokenizer of a GGUF file as the files of a Hugging Face tokenizer.

GGUF stores the vocabulary and the merges, but only the name (`tokenizer.ggml.pre`) of how texts are split before the
merges. The splitting matters: SmolLM2 reads "12" as two tokens, Llama 3 as one, and a tokenizer that splits otherwise
feeds the model token sequences that it has never seen.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

_NEEDED = ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges")
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2_WORDS = _WORDS % r"\p{N}"
_LLAMA3_WORDS = _WORDS % r"\p{N}{1,3}"


class TokenType(IntEnum):
    """The values of `tokenizer.ggml.token_type` that tokens of byte-pair encodings have."""

    NORMAL = 1
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5


@dataclass(frozen=True)
class Splitting:
    """How a text is split before the merges."""

    pre_tokenizer: Callable[[], pre_tokenizers.PreTokenizer]
    normalizer: Callable[[], normalizers.Normalizer] | None = None
    ignore_merges: bool = False
    """Whether a word that is a token is taken whole, even where the merges do not lead to it."""
    begins: bool = False
    """Whether texts begin with the begin token where a file does not say."""


def _gpt2_words() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2_words()])


def _words(pattern: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    def build() -> pre_tokenizers.PreTokenizer:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return build


SPLITTINGS = {
    "gpt-2": Splitting(_gpt2_words),
    "smollm": Splitting(_single_digits),
    "qwen2": Splitting(_words(_QWEN2_WORDS), normalizer=normalizers.NFC),
    "llama-bpe": Splitting(_words(_LLAMA3_WORDS), ignore_merges=True, begins=True),
}
"""Splittings by their name in `tokenizer.ggml.pre`."""


def special_token_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return `bos_token_id`, `eos_token_id` and `pad_token_id`, as a config and a generation config state them.

    The end token is a list where the file ends texts and turns with different tokens.
    """
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "padding")}
    ends = list(dict.fromkeys(token for token in (ids["eos"], ids["eot"]) if token is not None))
    stated = {
        "bos_token_id": ids["bos"],
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": ids["padding"],
    }
    return {name: value for name, value in stated.items() if value is not None}


def write_tokenizer(metadata: Mapping[str, Any], folder: Path) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and, if the file has one, `chat_template.jinja`.

    Raises:
        ValueError: a tokenizer that is not a byte-level byte-pair encoding, or one of unknown splitting.
    """
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens", [])
    build_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for role, name in {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": "unk"}.items():
        token = metadata.get(f"tokenizer.ggml.{role}_token_id")
        if token is not None:
            config[f"{name}_token"] = tokens[token]
    config["model_max_length"] = metadata[f"{metadata['general.architecture']}.context_length"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")
    if "tokenizer.chat_template" in metadata:
        (folder / "chat_template.jinja").write_text(metadata["tokenizer.chat_template"], "utf-8")


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer of a file with these metadata.

    Raises:
        ValueError: a tokenizer that is not a byte-level byte-pair encoding or not whole, one of unknown splitting, or
            one that adds a token which the file does not name.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise ValueError(
            f"tokenizer.ggml.model is {model!r}; only byte-level byte-pair encodings ('gpt2') can be converted"
        )
    if missing := [key for key in _NEEDED if key not in metadata]:
        raise ValueError(f"the file's tokenizer is not whole: {', '.join(missing)} is missing; fetch the file again")
    splitting = _splitting(metadata)
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    # Tokens that are marked unused only fill up the embedding's rows; no text contains them.
    vocabulary = {token: i for i, token in enumerate(tokens) if types[i] != TokenType.UNUSED}
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=splitting.ignore_merges))
    if splitting.normalizer is not None:
        tokenizer.normalizer = splitting.normalizer()
    tokenizer.pre_tokenizer = splitting.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(_added_tokens(tokens, types))
    if surround := _surrounding_tokens(metadata, splitting):
        before, after = surround
        template = [*before, "$A", *after]
        ids = [(token, tokenizer.token_to_id(token)) for token in (*before, *after)]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
    return tokenizer


def _splitting(metadata: Mapping[str, Any]) -> Splitting:
    name = metadata.get("tokenizer.ggml.pre")
    if name not in SPLITTINGS:
        raise ValueError(
            f"tokenizer.ggml.pre is {name!r}; the splittings that can be converted are {', '.join(SPLITTINGS)}"
        )
    return SPLITTINGS[name]


def _added_tokens(tokens: Sequence[str], types: Sequence[int]) -> list[AddedToken]:
    """Return the tokens that are found in a text before it is split; decoding may leave out those that are special."""
    return [
        AddedToken(token, special=kind == TokenType.CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED)
    ]


def _surrounding_tokens(metadata: Mapping[str, Any], splitting: Splitting) -> tuple[list[str], list[str]] | None:
    """Return the tokens that are put before and after every text, or None where there are none."""
    before, after = _added(metadata, "bos", splitting.begins), _added(metadata, "eos", False)
    return (before, after) if before or after else None


def _added(metadata: Mapping[str, Any], role: str, otherwise: bool) -> list[str]:
    """Return the token of a role, if texts get it; `otherwise` says so where the file does not."""
    stated, token = (metadata.get(f"tokenizer.ggml.{key}") for key in (f"add_{role}_token", f"{role}_token_id"))
    if token is not None:
        return [metadata["tokenizer.ggml.tokens"][token]] if (otherwise if stated is None else stated) else []
    if stated:
        raise ValueError(f"tokenizer.ggml.add_{role}_token is true, but the file has no tokenizer.ggml.{role}_token_id")
    return []
