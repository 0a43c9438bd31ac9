"""FSDP engines for the worker processes: the counterpart of `megatron_cases.Case`, whose functions take both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from open_engine import EngineCase, WholeBatches

from fivefold.config.schema.engine import EngineConfig, FSDPConfig
from fivefold.engine.contract import EngineOptions
from fivefold.fsdp.engine import FSDPEngine
from fivefold.fsdp.optimizer import gradient
from fivefold.layout.parser import parse_backend
from fivefold.weights.stream import unstacked


class OpenFSDPEngine(WholeBatches, FSDPEngine):
    """An engine that shows its gradients."""

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the accumulated gradient under Hugging Face names, exported in the place of the weights."""
        assert self.optimizer is not None
        shards = list(self.shards)
        weights = [shard.values_N.clone() for shard in shards]
        for shard in shards:
            shard.values_N.copy_(self.optimizer._gradient(shard))
        exported = unstacked(self.shards.export(torch.float32, None))
        yield from ((name, grad) for name, grad in exported if not name.endswith("e_score_correction_bias"))
        for shard, values_N in zip(shards, weights, strict=True):
            shard.values_N.copy_(values_N)

    def spoil_gradient(self) -> None:
        """Make a gradient that is not finite."""
        for shard in self.shards:
            gradient(shard.tensor).fill_(torch.nan)


@dataclass(frozen=True)
class FSDPCase(EngineCase[OpenFSDPEngine]):
    """A layout of FSDP, and its options."""

    fsdp: FSDPConfig = field(default_factory=FSDPConfig)

    def _build(self, config: dict[str, Any], options: EngineOptions) -> OpenFSDPEngine:
        return OpenFSDPEngine(EngineConfig(**config, fsdp=self.fsdp), parse_backend(self.layout), options)
