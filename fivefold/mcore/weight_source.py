"""Where the weights of a model come from: drawn at random, a Hugging Face folder, or a checkpoint of Megatron-Core."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fivefold.bridge.bridge import Bridge, checked_source
from fivefold.bridge.groups import ShardGroups
from fivefold.bridge.hf_reader import HFWeights
from fivefold.bridge.megatron_reader import MegatronWeights
from fivefold.bridge.parameters import Parameter, Parameters
from fivefold.bridge.random_weights import RandomWeights
from fivefold.bridge.reading import fill_range
from fivefold.config.schema.engine import EngineConfig
from fivefold.engine.state.slices import FixedSlice
from fivefold.families.shape import ModelShape
from fivefold.mcore.optimizer import Optimizer


@dataclass(frozen=True)
class WeightSource:
    """The weights that a recipe names."""

    config: EngineConfig
    folder: Path
    """Folder of the model's config."""
    stored: ModelShape
    """Shape of the model in the files, which need not be a critic."""

    def load(
        self, bridge: Bridge, weights: Mapping[str, Tensor], groups: ShardGroups, seed: int, device: torch.device
    ) -> None:
        """Fill this rank's weights; see `Bridge.load`. Random ones are drawn with `seed`, on `device`."""
        if self.config.init_from_scratch:
            dtype = getattr(torch, self.config.dtype)
            bridge.load(weights, RandomWeights.of(self.stored, self.folder, seed, device, dtype), groups)
            return
        with self._files() as files:
            bridge.load(weights, files, groups)

    def refine(self, optimizer: Optimizer, parameters: Parameters[Parameter], shape: ModelShape) -> None:
        """Give master weights the digits that files have and the model's weights have not; all ranks call it together.

        Args:
            optimizer: its master weights are the rounded weights.
            parameters: this rank's parameters.
            shape: the model, which may be a critic.
        """
        if self.config.init_from_scratch or self.config.dtype == "float32":
            return
        with self._files() as files:
            rounded = {name for name in files.names if _is_finer(files.dtype(name), getattr(torch, self.config.dtype))}
            if not rounded:
                return
            source = checked_source(shape, files)
            for part in optimizer.slices():
                mapping = parameters[part.name].mapping
                if isinstance(part, FixedSlice) or rounded.isdisjoint(mapping.sources()):
                    continue
                values_N = torch.empty(part.end - part.start)
                fill_range(values_N, part.start, mapping, source, parameters.groups)
                part.set("param", values_N)
        optimizer.finish_loading()

    def _files(self) -> HFWeights | MegatronWeights:
        checkpoint = self.config.megatron.dist_checkpointing_path
        return HFWeights(self.folder) if checkpoint is None else MegatronWeights(checkpoint, self.stored)


def _is_finer(stored: torch.dtype | None, weights: torch.dtype) -> bool:
    return stored is not None and torch.finfo(stored).eps < torch.finfo(weights).eps
