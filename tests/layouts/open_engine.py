"""What the tests add to every training engine, and what the cases of all engines have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from fivefold.algorithms.loss import Loss
from fivefold.algorithms.metrics import metric_values
from fivefold.batch import Batch
from fivefold.config.schema.engine import MicroBatchConfig, OptimizerConfig
from fivefold.engine.base import EngineBase
from fivefold.engine.contract import EngineOptions
from fivefold.engine.packing import Share
from fivefold.engine.scores import Logprobs
from fivefold.engine.values import Values
from fivefold.layout.parser import parse_backend


class WithEntropies(Logprobs):
    """The log-probs, and the entropies as a column too."""

    def columns(self, rows_PT: torch.Tensor, mask_T: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logprobs": rows_PT[0], "entropy": rows_PT[1]}


class WholeBatches(EngineBase[Any]):
    """An engine that takes whole mini-batches, and returns the results of all replicas."""

    def forward_backward_of(self, batch: Batch, loss: Loss) -> dict[str, float]:
        """Call `forward_backward` on this replica's share of a whole mini-batch; return the numbers of its metrics."""
        return metric_values(self.forward_backward(self.share(batch), loss))

    def logprobs_of(self, batch: Batch, *, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Score the log-probs; return the whole mini-batch's results, assembled from the shares of all replicas."""
        own = self.score(self.share(batch), WithEntropies(temperature))
        logprobs, entropies = self._assembled(batch, torch.stack(list(own.values())))
        return logprobs, entropies

    def values_of(self, batch: Batch) -> torch.Tensor:
        """Score the values; return those of the whole mini-batch."""
        return self._assembled(batch, self.score(self.share(batch), Values())["values"][None])[0]

    def share(self, batch: Batch) -> Share:
        """Return this replica's share of a whole mini-batch."""
        return self.planner.plan(batch.lengths, cuts=batch.cuts).share(batch, self.groups.dp.rank())

    def _assembled(self, batch: Batch, own: torch.Tensor) -> torch.Tensor:
        """Return the rows of the whole mini-batch, of which `own` has this replica's part."""
        whole = torch.zeros(len(own), batch.n_tokens)
        starts, place = batch.offsets(), 0
        for index in self.planner.plan(batch.lengths, cuts=batch.cuts).sequences(self.groups.dp.rank()):
            length = batch.lengths[index]
            whole[:, starts[index] : starts[index + 1]] = own[:, place : place + length]
            place += length
        torch.distributed.all_reduce(whole, group=self.groups.dp)
        return whole


AnEngine = TypeVar("AnEngine", bound=WholeBatches)


@dataclass(frozen=True)
class EngineCase(ABC, Generic[AnEngine]):
    """An engine's layout and options: the base of a case of each engine, which adds its own options."""

    layout: str
    micro_batches: MicroBatchConfig = field(
        default_factory=lambda: MicroBatchConfig(max_tokens_per_mb=70), kw_only=True
    )
    dtype: str = field(default="float32", kw_only=True)
    init_from_scratch: bool = field(default=False, kw_only=True)
    timeout_s: float = field(default=120.0, kw_only=True)

    @property
    def world_size(self) -> int:
        return parse_backend(self.layout).world_size

    @abstractmethod
    def _build(self, config: dict[str, Any], options: EngineOptions) -> AnEngine:
        """Return the engine of a configuration without the engine's own section."""

    def engine(
        self,
        folder: Path,
        optimizer: OptimizerConfig | None = None,
        total_steps: int = 10,
        seed: int = 1,
        **others: Any,
    ) -> AnEngine:
        """Return the engine of a model; `others` are further `EngineOptions`."""
        config = {
            "path": str(folder),
            "backend": self.layout,
            "dtype": self.dtype,
            "init_from_scratch": self.init_from_scratch,
            "mb_spec": self.micro_batches,
        }
        options = EngineOptions(
            seed=seed, optimizer=optimizer, total_steps=total_steps, timeout_s=self.timeout_s, **others
        )
        return self._build(config, options)
