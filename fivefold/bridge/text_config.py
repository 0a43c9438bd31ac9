"""The config with which transformers builds the language model in a folder, as engines compute it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from fivefold.families.family import Family
from fivefold.families.registry import FAMILIES, family_in_memory

_OF_CLASS = ("model_type", "layer_types", "head_dim")
"""Keys that say something else to another class of models."""


def text_config(folder: str | Path, **options: Any) -> PreTrainedConfig:
    """Return the config of the language model in a folder or of a hub name.

    It is inside the config of a model that sees images. A model with parts that are not computed has the config of a
    model without them (`Family.computed_as`).
    """
    whole = AutoConfig.from_pretrained(folder, **options)
    config = whole.get_text_config()
    # A class of text_config may have another default than the whole model's, which counts.
    stated, _ = PreTrainedConfig.get_config_dict(folder)
    inside = stated.get("text_config") or {}
    config.tie_word_embeddings = {"tie_word_embeddings": whole.tie_word_embeddings, **inside, **stated}[
        "tie_word_embeddings"
    ]
    family = family_in_memory(config.model_type)
    if family is None or family.computed_as is None:
        return config
    fields = {key: value for key, value in config.to_dict().items() if key not in _OF_CLASS}
    # Attention is dense where an indexer chooses every token of a sequence.
    fields["max_position_embeddings"] = min(config.max_position_embeddings, config.index_topk)
    return AutoConfig.for_model(family.computed_as, **(fields | options))


def family_of(folder: str | Path) -> Family | None:
    """Return the family of the model in a folder or of a hub name; None: it is not known."""
    stated, _ = PreTrainedConfig.get_config_dict(folder)
    return FAMILIES.get(stated.get("model_type", ""))
