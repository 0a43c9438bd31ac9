"""Hugging Face folders of quantized weights to ordinary ones: float8 in blocks, and experts in MXFP4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fivefold.bridge.bridge import checked_source
from fivefold.bridge.hf_reader import HFWeights, resolve_model_folder
from fivefold.bridge.hf_writer import save_hf, tensor_specs
from fivefold.bridge.reading import TensorReader
from fivefold.bridge.shard_plan import TensorSpec
from fivefold.convert.fp8_model import Float8InBlocks
from fivefold.convert.megatron import Converted, has_further_layers, left_out
from fivefold.convert.mxfp4_model import MXFP4Experts
from fivefold.convert.target import Progress, free_target, streamed
from fivefold.families.read import load_shape
from fivefold.families.shape import ModelShape
from fivefold.families.tensors import kept_tensors
from fivefold.json_text import parsed


def convert_quantized(
    source: str | Path,
    out: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Converted:
    """Write a model of quantized weights in floating point.

    Args:
        source: the model's folder.
        out: the folder to write. It appears when it is complete.
        dtype: dtype of the weights, apart from routers' offsets, which are float32.
        overwrite: whether an earlier model folder at `out` may be replaced.
        progress: receives how far the conversion is.

    Raises:
        ValueError: no such model, one that is quantized in another way or whose weights are not whole, or something at
            `out`.
        OSError: the disk is full, or the file system refuses to write.
    """
    target, folder = free_target(out, overwrite=overwrite), resolve_model_folder(source)
    shape = load_shape(folder)
    with HFWeights(folder) as stored:
        weights: TensorReader = MXFP4Experts(stored) if _method(folder) == "mxfp4" else Float8InBlocks(stored)
        checked_source(shape, weights)
        tensors = tensor_specs(shape, dtype) | _indexers(weights, stored, shape, dtype)
        save_hf(target, streamed(weights, tensors, progress), folder, tensors=tensors)
        return Converted(shape, len(tensors), left_out(further_layers=has_further_layers(stored, shape)))


def _indexers(weights: TensorReader, stored: HFWeights, shape: ModelShape, dtype: torch.dtype) -> dict[str, TensorSpec]:
    """Return dtype and shape of the tensors of indexers, which keep the dtype that they have unless it is quantized.

    Raises:
        ValueError: some are missing.
    """
    wanted = kept_tensors(shape)
    if missing := sorted(wanted.keys() - weights.names):
        raise ValueError(f"{stored.folder} lacks {missing[0]}, and {len(missing) - 1} more: fetch the model again")
    return {name: TensorSpec(stored.dtype(name) or dtype, full) for name, full in wanted.items()}


def _method(folder: Path) -> Any:
    """Return how a model is quantized, as its config says."""
    stated = parsed((folder / "config.json").read_text())["quantization_config"]
    return stated.get("quant_method") if isinstance(stated, dict) else None
