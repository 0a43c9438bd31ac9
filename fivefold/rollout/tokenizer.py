"""Loads tokenizers. It is apart from `hf_model`, because the classes of models take two seconds to import."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from transformers import AutoTokenizer

from fivefold.config.paths import resolve_model_path
from fivefold.config.schema.run import RunConfig
from fivefold.json_text import read_json
from fivefold.rollout.chat_template import ChatTemplate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
_DATE = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
"""A call of the function by which a chat template knows the date; its second group is the format."""


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer at `path` (folder or hub name).

    Args:
        path: folder or hub name.
        trust_remote_code: whether Python code of the folder is run.

    Raises:
        ValueError: there is none. For some families transformers then makes one without a vocabulary, which turns every
            text into no tokens.
    """
    problem = (
        f"{path!r} has no usable tokenizer: put its files (tokenizer.json, tokenizer_config.json) there, or name the "
        "folder that has them in the recipe's `tokenizer_path`"
    )
    if not trust_remote_code and (code := _own_code(Path(path))):
        raise ValueError(
            f"the tokenizer of {path!r} is Python code of its folder ({code}), which is not run: set "
            "trust_remote_code=true in the recipe if you trust this code, or name a folder with a tokenizer.json in "
            "the recipe's `tokenizer_path`"
        )
    try:
        # False, not None: transformers would ask on the terminal whether to run code of a hub.
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        # Some odd settings only show once the tokenizer works.
        tokenizer.decode(tokenizer("").input_ids, skip_special_tokens=True)
    except (ValueError, OSError) as error:  # OSError: neither the folder nor the hub has one
        raise ValueError(f"{problem} ({error})") from error
    except Exception as error:  # files of any content reach transformers' code, and the folder's own
        raise ValueError(f"{problem} (reading them failed: {error!r})") from error
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise ValueError(f"{problem} (its vocabulary is {sorted(tokenizer.get_vocab())})")
    return tokenizer


def tokenizer_of(recipe: RunConfig, model: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a recipe whose model is at `model` (folder or hub name).

    Raises:
        ValueError: see `load_tokenizer` and `ChatTemplate`.
    """
    path = resolve_model_path(recipe.tokenizer_path or model)
    tokenizer = load_tokenizer(path, trust_remote_code=recipe.trust_remote_code)
    ChatTemplate.of(recipe).apply(tokenizer)
    return tokenizer


def _own_code(folder: Path) -> str | None:
    """Return the class of a folder's own code that its tokenizer needs; None: it needs none."""
    config = folder / "tokenizer_config.json"
    if (folder / "tokenizer.json").exists() or not config.is_file():
        return None
    try:
        settings = read_json(config)
    except ValueError:
        return None  # transformers says what is wrong with the file
    auto_map = settings.get("auto_map") if isinstance(settings, dict) else None
    classes = auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else None
    named = [name for name in (classes if isinstance(classes, list) else [classes]) if isinstance(name, str)]
    return named[0] if named else None


def has_tokenizer(folder: Path) -> bool:
    """Return whether a model's folder has files of a tokenizer."""
    return any((folder / name).exists() for name in _FILES)


def other_token(tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> tuple[int, str, str] | None:
    """Return the first token that two tokenizers have and write otherwise, its number before both forms; or None."""
    forms = {number: token for token, number in other.get_vocab().items()}
    for token, number in sorted(tokenizer.get_vocab().items(), key=itemgetter(1)):
        if forms.get(number, token) != token:
            return number, token, forms[number]
    return None


def fix_date(tokenizer: PreTrainedTokenizerBase, moment: datetime) -> None:
    """Let the chat templates of a tokenizer write the date of `moment`, where they would write the date of each call.

    Templates such as Llama 3.2's write the date into every prompt, so that a run that continues the next day would have
    other prompts. transformers takes no function in the place of its `strftime_now`; templates call it with literals.
    """

    def written(template: str) -> str:
        return _DATE.sub(lambda call: json.dumps(moment.strftime(call[2])), template)

    template = tokenizer.chat_template
    if isinstance(template, str):
        tokenizer.chat_template = written(template)
    elif template:
        tokenizer.chat_template = {name: written(one) for name, one in template.items()}


def decoded(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[npt.NDArray[np.int32]]) -> list[str]:
    """Return sampled tokens as texts, as rewards get them: without special tokens, and else as they were written."""
    # Some tokenizers ask to take the spaces before punctuation away, which a program or a format may need.
    options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    # As arrays, because the library looks at each element of a list.
    texts: list[Any] = [tokenizer.decode(tokens, **options) for tokens in token_ids]
    return texts
