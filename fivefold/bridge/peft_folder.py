"""The adapters of a model as a folder that PEFT, vLLM and SGLang load: adapter_model.safetensors and a config."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fivefold.bridge import folder_swap
from fivefold.bridge.hf_writer import begin_folder
from fivefold.bridge.pieces import Piece
from fivefold.bridge.shard_plan import TensorSpec, plan_shards
from fivefold.families.adapters import CONFIG, PREFIX, WEIGHTS, layer_of
from fivefold.families.served import adapters_of
from fivefold.families.shape import ModelShape
from fivefold.families.tensors import tensors


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
        adapters, usual = adapters_of(shape), usual_rank(shape)
        self._factors = {
            name: adapters.scale(tensor.shape[1]) / adapters.scale(usual)
            for tensor in tensors(shape)
            if tensor.name.endswith("lora_B.weight") and tensor.shape[1] != usual
            for name in tensor.names
        }
        own = [tensor for tensor in tensors(shape) if tensor.adapts]
        self._names = {
            name: tensor.names_in_peft if tensor.shared_by else (name,) for tensor in own for name in tensor.names
        }
        specs = {PREFIX + name: TensorSpec(dtype, tensor.shape) for tensor in own for name in tensor.names_in_peft}
        self.plan = plan_shards(specs, sum(spec.n_bytes for spec in specs.values()))

    def blocks(self, piece: Piece, content: Tensor) -> Iterator[tuple[Piece, Tensor]]:
        """Yield a piece of an adapter as it is in the file: with the name that it has there, once for each expert.

        B of a layer with another rank than the usual one has the difference of their scales in it: engines that serve
        models have one scale for all.
        """
        if (factor := self._factors.get(piece.name)) is not None:
            content = content * factor
        for name in self._names[piece.name]:
            yield replace(piece, name=PREFIX + name), content

    kept_bytes = 0
    """All of it is trained."""

    def begin(self) -> Path:
        """Return a new folder next to the target, with a weight file that has no data yet.

        Raises:
            OSError: the folder cannot be written.
        """
        return begin_folder(self.target, self.plan)

    def finish(self, partial: Path) -> None:
        """Add the config, and put the folder in its place. All weights must be on the disk."""
        [file] = self.plan.files
        (partial / file.name).rename(partial / WEIGHTS)
        (partial / CONFIG).write_text(json.dumps(self._config, indent=2) + "\n")
        folder_swap.sync(partial / CONFIG)
        folder_swap.commit(partial, self.target)


def peft_config(shape: ModelShape, base: str) -> dict[str, Any]:
    """Return PEFT's configuration of a model's adapters."""
    adapters, own = adapters_of(shape), [tensor for tensor in tensors(shape) if tensor.adapts]
    ranks = {str(tensor.adapts): tensor.shape[0] for tensor in own if tensor.name.endswith("lora_A.weight")}
    usual = usual_rank(shape)
    scaled = adapters.scale(usual) * adapters.alpha
    alphas = {rank: scaled / adapters.scale(rank) for rank in ranks.values()} | {usual: adapters.alpha}
    config = lora_config(ranks, usual, alphas, use_rslora=adapters.rank_stabilized)
    return {**config, "base_model_name_or_path": base}


def lora_config(
    ranks: Mapping[str, int], usual: int, alphas: Mapping[int, float], *, use_rslora: bool
) -> dict[str, Any]:
    """Return PEFT's configuration of adapters without the model that they are for.

    Args:
        ranks: the rank of each adapter, by the weight that it adapts.
        usual: the rank that is named once; patterns name the others.
        alphas: PEFT's alpha of adapters of each rank.
        use_rslora: whether PEFT divides alpha by the square root of the rank.
    """
    other = {_pattern(name): rank for name, rank in ranks.items() if rank != usual}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": usual,
        "lora_alpha": alphas[usual],
        "use_rslora": use_rslora,
        "target_modules": sorted({str(layer_of(name)) for name in ranks}),
        "rank_pattern": other,
        "alpha_pattern": {name: alphas[rank] for name, rank in other.items()},
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }


def usual_rank(shape: ModelShape) -> int:
    """Return the rank that the config names: the experts', if they have adapters, because PEFT fuses theirs."""
    adapters = adapters_of(shape)
    return adapters.expert_rank if shape.is_moe and adapters.expert_rank is not None else adapters.rank


def _pattern(weight: str) -> str:
    """Return the pattern of a weight's layer, in all layers of the decoder."""
    return re.escape(re.sub(r"^.*layers\.\d+\.", "", weight.removesuffix(".weight")))
