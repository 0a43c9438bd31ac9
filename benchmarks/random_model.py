"""Folders of models with the shapes of known ones, for engines that start from random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fivefold.families.read import SHAPES, load_shape
from fivefold.families.tensors import kept_tensors


def write_config(folder: Path, model: str, **changes: Any) -> dict[str, Any]:
    """Write the config.json of a shape in fivefold/families/shapes/, and random indexers if it has some, which no
    trainer draws. Returns the config.

    Args:
        model: name of the shape, without .json.
        changes: keys of the config with other values.
    """
    config: dict[str, Any] = json.loads((SHAPES / f"{model}.json").read_text())
    config["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config["model_type"]]]
    config |= {"torch_dtype": "bfloat16", "eos_token_id": 0, **changes}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][: config["num_hidden_layers"]]
    (folder / "config.json").write_text(json.dumps(config))
    if kept := kept_tensors(load_shape(folder)):
        indexers = {name: 0.02 * torch.randn(full, dtype=torch.bfloat16) for name, full in kept.items()}
        save_file(indexers, folder / "model.safetensors", {"format": "pt"})
    return config


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Write a tokenizer whose tokens are the words `w0`, `w1` and so on; `w0` is the end of a sequence."""
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(vocabulary)}, unk_token="w1"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0", pad_token="w0").save_pretrained(folder)
