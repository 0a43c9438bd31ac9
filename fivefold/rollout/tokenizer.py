"""Loads tokenizers. It is apart from `hf_model`, because the classes of models take two seconds to import."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import AutoTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer at `path` (folder or hub name).

    Raises:
        ValueError: there is none. For some families transformers then makes one without a vocabulary, which turns every
            text into no tokens.
    """
    problem = (
        f"{path!r} has no usable tokenizer: put its files (tokenizer.json, tokenizer_config.json) there, or name the "
        "folder that has them in the recipe's `tokenizer_path`"
    )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (ValueError, OSError) as error:  # OSError: neither the folder nor the hub has one
        raise ValueError(f"{problem} ({error})") from error
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise ValueError(f"{problem} (its vocabulary is {sorted(tokenizer.get_vocab())})")
    return tokenizer


def decoded(tokenizer: PreTrainedTokenizerBase, token_ids: list[list[int]]) -> list[str]:
    """Return completions as texts, as rewards get them: without special tokens, and else as they were written."""
    # Some tokenizers ask to take the spaces before punctuation away, which a program or a format may need.
    return tokenizer.batch_decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
