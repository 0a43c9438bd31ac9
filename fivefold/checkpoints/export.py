"""Writes the model of a checkpoint as a Hugging Face folder, in one process without a GPU.

checkpoint's trainer/ ──one tensor at a time──> the dtype of the model ──> safetensors, config, tokenizer
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from fivefold.bridge.hf_reader import resolve_model_folder
from fivefold.bridge.hf_writer import save_hf, tensor_specs
from fivefold.checkpoints.fingerprints import config_fingerprint
from fivefold.checkpoints.store import RECIPE, TRAINER, Checkpoint
from fivefold.config.load import kind_of
from fivefold.config.schema.preferences import RMRecipe
from fivefold.config.source import read_mapping
from fivefold.engine.state.stored_state import StoredState
from fivefold.families.read import load_shape
from fivefold.families.shape import ModelShape


def export_model(
    checkpoint: Checkpoint,
    out: Path,
    *,
    model: str | None = None,
    dtype: str | None = None,
    on_elements: Callable[[int, int], None] = lambda done, total: None,
) -> ModelShape:
    """Write the model of `checkpoint` to the folder `out`, which appears when it is complete.

    Args:
        checkpoint: the checkpoint, which has been verified.
        out: the folder to write; an earlier one is replaced.
        model: folder or hub name of the model's config and tokenizer; None: as in the checkpoint's recipe.
        dtype: dtype of the weights, such as `float32`; None: the recipe's, in which the run saves weights too.
        on_elements: called with the numbers of elements that are written, and of all.

    Returns:
        the shape of the model.

    Raises:
        ValueError: the model's config is not to be found, or describes another model.
        OSError: the disk is full, or the file system refuses to write.
    """
    recipe = read_mapping(checkpoint.path / RECIPE)
    actor = recipe.get("actor")
    if not isinstance(actor, Mapping) or not {"path", "dtype"} <= actor.keys():
        raise ValueError(f"{checkpoint.path / RECIPE} is damaged: it does not say which model the run has trained")
    source = _source(checkpoint, actor["path"], model)
    is_reward_model = kind_of(recipe) is RMRecipe
    shape = load_shape(source).as_reward_model() if is_reward_model else load_shape(source)
    tensors = tensor_specs(shape, getattr(torch, dtype or actor["dtype"]))
    state = StoredState(checkpoint.path / TRAINER)
    state.check({name: spec.shape for name, spec in tensors.items()})

    def weights() -> Iterator[tuple[str, Tensor]]:
        done = 0
        for name, spec in tensors.items():
            yield name, state.read(name).to(spec.dtype)
            done += spec.n_elements
            on_elements(done, shape.n_parameters)

    save_hf(
        out,
        weights(),
        source,
        tensors=tensors,
        tokenizer_source=recipe.get("tokenizer_path") if model is None else None,
        scores="Sequence" if is_reward_model else None,
    )
    return shape


def _source(checkpoint: Checkpoint, path: str, model: str | None) -> Path:
    """Return the folder of the model's config, which must be the one that was trained."""
    try:
        source = resolve_model_folder(model or path)
    except ValueError as error:
        raise ValueError(
            f"the config and the tokenizer of the model are not where the run had them ({error}): name a folder that "
            "has them with --model"
        ) from error
    if config_fingerprint(source) != checkpoint.manifest().model:
        raise ValueError(
            f"{source}/config.json does not describe the model in {checkpoint.path}, or it has changed since: name the "
            "folder of that model with --model"
        )
    return source
