"""The adapters of a model as a folder that PEFT, vLLM and SGLang load: adapter_model.safetensors and a config."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fivefold.bridge import folder_swap
from fivefold.bridge.pieces import Piece
from fivefold.bridge.shard_files import ShardFiles
from fivefold.bridge.shard_plan import TensorSpec, plan_shards
from fivefold.families.adapters import layer_of
from fivefold.families.shape import ModelShape
from fivefold.families.tensors import tensors

PREFIX = "base_model.model."
"""What PEFT puts before the names of a model's layers."""
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


class AdapterFolder:
    """A folder of adapters that is written next to its final place (`hf_saver.NewFolder`)."""

    def __init__(self, folder: Path, shape: ModelShape, dtype: torch.dtype, base: str) -> None:
        """Describe the folder; nothing is written.

        Args:
            folder: where it is to be in the end.
            shape: the model with its adapters.
            dtype: dtype of the matrices.
            base: the model that they adapt, for the config.
        """
        self.target = folder.resolve()
        self._config = peft_config(shape, base)
        specs = {
            PREFIX + name: TensorSpec(dtype, tensor.shape)
            for tensor in tensors(shape)
            if tensor.adapts
            for name in tensor.names
        }
        self.plan = plan_shards(specs, sum(spec.n_bytes for spec in specs.values()))

    def piece(self, piece: Piece) -> Piece:
        """Return a piece under the name that its tensor has in the file."""
        return replace(piece, name=PREFIX + piece.name)

    def begin(self) -> Path:
        """Return a new folder next to the target, with a weight file that has no data yet.

        Raises:
            OSError: the folder cannot be written.
        """
        partial = folder_swap.begin(self.target)
        try:
            with ShardFiles(partial, self.plan) as files:
                files.create()
                files.sync()
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return partial

    def finish(self, partial: Path) -> None:
        """Add the config, and put the folder in its place. All weights must be on the disk."""
        [file] = self.plan.files
        (partial / file.name).rename(partial / WEIGHTS)
        (partial / CONFIG).write_text(json.dumps(self._config, indent=2) + "\n")
        folder_swap.sync(partial / CONFIG)
        folder_swap.commit(partial, self.target)


def peft_config(shape: ModelShape, base: str) -> dict[str, Any]:
    """Return PEFT's configuration of a model's adapters."""
    adapters = shape.adapters
    assert adapters is not None
    own = [tensor for tensor in tensors(shape) if tensor.adapts and tensor.name.endswith("lora_A.weight")]
    ranks = dict(_ranks([(str(tensor.adapts), tensor.shape[0]) for tensor in own], adapters.rank))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "use_rslora": adapters.rank_stabilized,
        "target_modules": sorted({str(layer_of(str(tensor.adapts))) for tensor in own}),
        "rank_pattern": ranks,
        "alpha_pattern": {},
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }


def _ranks(weights: list[tuple[str, int]], usual: int) -> Iterator[tuple[str, int]]:
    """Yield a pattern of the layers of each kind of expert whose rank is not the usual one, and the rank."""
    for name, rank in weights:
        if rank != usual:
            within = re.sub(r"^.*layers\.\d+\.", "", name.removesuffix(".weight"))
            yield re.escape(within).replace(r"\{expert\}", r"\d+"), rank
