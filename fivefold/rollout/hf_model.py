"""Builds a transformers model for generation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import no_init_weights
from transformers.utils import CONFIG_NAME
from transformers.utils.hub import cached_file
from transformers.utils.logging import disable_progress_bar, get_verbosity, set_verbosity, set_verbosity_error

from fivefold.bridge.finite import not_finite_error
from fivefold.bridge.text_config import family_of, text_config
from fivefold.bridge.weight_files import survey
from fivefold.families.registry import family_in_memory
from fivefold.rollout.delta_rule import use_torch_delta_rule
from fivefold.rollout.forward import ATTENTION_NAME, register_attention, windows_of
from fivefold.rollout.hf_names import not_finite

_ROW_BYTES = 16
"""The rows of the matrices that torch's grouped matmul takes begin at multiples of so many bytes."""


def build_model(
    path: str, *, dtype: torch.dtype, device: torch.device, load_weights: bool
) -> tuple[PreTrainedModel, GenerationConfig | None]:
    """Build the causal language model at `path` for inference; also return its generation config, if it has one.

    Args:
        path: model folder or hub name.
        dtype: dtype of the parameters.
        device: device of the parameters.
        load_weights: False: only the config is read, and parameters stay uninitialised until the actor sends them.

    Raises:
        ValueError: a checkpoint whose tensors are not the model's or are not finite, or a model with a kind of
            attention that this engine does not have for its family.
    """
    register_attention()
    with _reading("config.json"):
        config = text_config(path)
        _check_attention(config)
    # Experts stay on transformers' default, one grouped matmul over rows sorted by expert. Its `batched_mm` copies an
    # expert's weights for each row, and `eager` loops over experts in Python; it is for widths that the grouped matmul
    # refuses.
    options = {"dtype": dtype, "attn_implementation": ATTENTION_NAME}
    if load_weights:
        model = _load(path, config, options)
        model.to(device)  # type: ignore[arg-type]
        _check_finite(model, path)
    else:
        with _reading("config.json"), torch.device(device), no_init_weights():
            model = model_class(config).from_config(config, **options)
        model.tie_weights()
    if not _fits_grouped_matmul(model):
        model.set_experts_implementation("eager")
    if device.type != "cuda" or torch.are_deterministic_algorithms_enabled():
        use_torch_delta_rule(model)
    return model.train(False).requires_grad_(False), _generation_config(path)


def model_class(config: PreTrainedConfig) -> Any:
    """Return what builds and loads a language model, for some families by its text_config."""
    if not config.model_type.endswith(("_vl_text", "_vl_moe_text")):
        return AutoModelForCausalLM
    from fivefold.rollout.vision import TEXT_MODELS  # by models that see images

    return TEXT_MODELS[config.model_type]


def end_tokens(
    model: PreTrainedModel, generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase
) -> frozenset[int]:
    """Return all end-of-sequence tokens that the model's config, its generation config or its tokenizer names.

    Ids outside the model's vocabulary are left out, because some configs write -1 for none.

    Raises:
        ValueError: one that is no integer.
    """
    named = [model.config.eos_token_id, tokenizer.eos_token_id]
    if generation is not None:
        named.append(generation.eos_token_id)
    ids = [token for some in named if some is not None for token in (some if isinstance(some, list) else [some])]
    if strays := [token for token in ids if not isinstance(token, int)]:
        raise ValueError(
            f"eos_token_id of the model or its generation_config.json has {strays[0]!r:.50}, and no token id"
        )
    return frozenset(token for token in ids if 0 <= token < model.config.vocab_size)


def _load(path: str, config: PreTrainedConfig, options: dict[str, Any]) -> PreTrainedModel:
    disable_progress_bar()
    model: PreTrainedModel
    # The report on tensors comes as an error, and not also as a warning.
    with _silenced(), _reading("config.json, generation_config.json or weights"):
        # Tensors of another shape are then in the report too; without the option they end in an error without a name.
        model, report = model_class(config).from_pretrained(
            path, config=config, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    if (family := family_of(path)) is not None:
        unexpected = report["unexpected_keys"]
        report["unexpected_keys"] = {name for name in unexpected if not family.keeps(name, config.num_hidden_layers)}
    problems = {kind: names for kind, names in report.items() if names}
    if problems:
        raise ValueError(f"the checkpoint at {path!r} does not fit its config.json: {problems}")
    return model


def check_size(path: str) -> None:
    """Refuse a config.json of a far larger model than the weight files hold: it would be filled up at random first.

    For models whose tensors `check_weights` does not know.

    Raises:
        ValueError: it describes twice as many parameters or more, or more layers than there are tensors.
    """
    with _reading("config.json"):
        config = AutoConfig.from_pretrained(path)
    if getattr(config, "quantization_config", None) is not None:
        return  # several numbers may be packed into one
    file = cached_file(path, CONFIG_NAME)
    tensors = survey(Path(file).parent).tensors.values() if file else ()
    n_stored = sum(math.prod(tensor.shape) for tensor in tensors)
    with _reading("config.json"):
        n_layers = config.get_text_config().num_hidden_layers
        too_deep = n_layers > len(tensors)
        if not too_deep:
            with torch.device("meta"):
                described = AutoModelForCausalLM.from_config(config).num_parameters()
    if tensors and (too_deep or described >= 2 * n_stored):
        what = f"{n_layers:,} layers" if too_deep else f"{described:,} parameters"
        raise ValueError(
            f"the config.json of {path!r} describes a model of {what}, and its weight files hold {len(tensors)} "
            f"tensors with {n_stored:,} numbers: fetch the folder again"
        )


def _fits_grouped_matmul(model: PreTrainedModel) -> bool:
    """Return whether torch's grouped matmul takes all fused experts, [E, out, in] or transposed."""
    experts = (matrices for name, matrices in model.named_parameters() if ".experts." in name and matrices.dim() == 3)
    family = family_in_memory(model.config.model_type)
    is_transposed = family is not None and family.moe is not None and family.moe.joint is not None
    # What the matrices multiply has rows of `in` elements.
    widths = (
        width * matrices.itemsize
        for matrices in experts
        for width in (matrices.shape[1:] if is_transposed else matrices.shape[2:])
    )
    return all(width % _ROW_BYTES == 0 for width in widths)


def _check_finite(model: PreTrainedModel, path: str) -> None:
    if names := not_finite(model):
        files = _files(path)
        raise not_finite_error(
            path, [f"{name} in {files.get(name, 'another file')}, read as {model.dtype}" for name in names]
        )


def _files(path: str) -> dict[str, str]:
    """Return the name of the safetensors file at `path` (folder or hub name) that holds each tensor."""
    config = cached_file(path, CONFIG_NAME)
    files: dict[str, str] = {}
    for file in sorted(Path(config).parent.glob("*.safetensors")) if config else ():
        with safe_open(file, framework="pt") as opened:
            files |= dict.fromkeys(opened.keys(), file.name)
    return files


def _check_attention(config: PreTrainedConfig) -> None:
    is_known = family_in_memory(config.model_type) is not None
    # The cache keeps the states and the windows of families that are known.
    known = {"full_attention"} | ({"linear_attention", "sliding_attention"} if is_known else set())
    others = sorted(set(getattr(config, "layer_types", None) or []) - known)
    if others or (windows_of(config) and not is_known):
        raise ValueError(
            f"the transformers rollout engine has full causal attention alone for {config.model_type}; this model's "
            f"config asks for {', '.join(others) or f'sliding_window={config.sliding_window}'}: use a model without "
            "it, or remove it from config.json"
        )


def _generation_config(path: str) -> GenerationConfig | None:
    with _reading("generation_config.json"):
        try:
            return GenerationConfig.from_pretrained(path)
        except OSError:  # transformers' answer to a folder without generation_config.json
            return None


@contextmanager
def _silenced() -> Iterator[None]:
    """Keep transformers from logging anything but errors."""
    verbosity = get_verbosity()
    set_verbosity_error()
    try:
        yield
    finally:
        set_verbosity(verbosity)


@contextmanager
def _reading(file: str) -> Iterator[None]:
    """Turn what transformers raises over the content of a model's file, which may be anything, into a ValueError."""
    try:
        yield
    except (OSError, ValueError):
        raise
    except Exception as error:
        raise ValueError(f"the model cannot be built from its {file}: {type(error).__name__}: {error}") from error
