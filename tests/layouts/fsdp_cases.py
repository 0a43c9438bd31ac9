"""FSDP engines for the worker processes: the counterpart of `megatron_cases.Case`, whose functions take both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fivefold.algorithms.loss import Loss
from fivefold.config.schema.engine import EngineConfig, FSDPConfig, MicroBatchConfig, OptimizerConfig
from fivefold.engine.sharing import Share
from fivefold.fsdp.engine import FSDPEngine
from fivefold.fsdp.optimizer import gradient
from fivefold.layout.parser import parse_backend
from fivefold.types import Batch


class OpenFSDPEngine(FSDPEngine):
    """An engine that takes whole mini-batches and shows its gradients."""

    def forward_backward_of(self, batch: Batch, loss: Loss) -> dict[str, float]:
        """Call `forward_backward` on this replica's share of a whole mini-batch."""
        return self.forward_backward(self.share(batch), loss)

    def logprobs_of(self, batch: Batch, *, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Call `compute_logprobs`; return the whole mini-batch's results."""
        own = torch.stack(self.compute_logprobs(self.share(batch), temperature=temperature))
        logprobs, entropies = self._assembled(batch, own)
        return logprobs, entropies

    def values_of(self, batch: Batch) -> torch.Tensor:
        """Call `compute_values`; return the whole mini-batch's values."""
        return self._assembled(batch, self.compute_values(self.share(batch))[None])[0]

    def _assembled(self, batch: Batch, own: torch.Tensor) -> torch.Tensor:
        """Return the rows of the whole mini-batch, of which `own` has this replica's part."""
        sequences = self.planner.plan(batch.lengths).sequences(self.groups.dp.rank())
        rows = [torch.arange(batch.offsets()[i], batch.offsets()[i + 1]) for i in sequences]
        whole = torch.zeros(len(own), batch.n_tokens)
        whole[:, torch.cat(rows)] = own
        torch.distributed.all_reduce(whole, group=self.groups.dp)
        return whole

    def share(self, batch: Batch) -> Share:
        """Return this replica's share of a whole mini-batch."""
        return self.planner.plan(batch.lengths).share(batch, self.groups.dp.rank())

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the accumulated gradient under Hugging Face names, exported in the place of the weights."""
        assert self.optimizer is not None
        shards = list(self.shards)
        weights = [shard.values_N.clone() for shard in shards]
        for shard in shards:
            shard.values_N.copy_(self.optimizer._gradient(shard))
        exported = self.shards.export(torch.float32, None)
        yield from ((name, grad) for name, grad in exported if not name.endswith("e_score_correction_bias"))
        for shard, values_N in zip(shards, weights, strict=True):
            shard.values_N.copy_(values_N)

    def spoil_gradient(self) -> None:
        """Make a gradient that is not finite."""
        for shard in self.shards:
            gradient(shard.parameter).fill_(torch.nan)


@dataclass(frozen=True)
class FSDPCase:
    """An engine's layout and options."""

    layout: str
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    micro_batches: MicroBatchConfig = field(default_factory=lambda: MicroBatchConfig(max_tokens_per_mb=50))
    dtype: str = "float32"
    init_from_scratch: bool = False

    @property
    def world_size(self) -> int:
        return parse_backend(self.layout).world_size

    def engine(
        self,
        folder: Path,
        optimizer: OptimizerConfig | None = None,
        total_steps: int = 10,
        seed: int = 1,
        *,
        value_head: bool = False,
        value_bias: bool = True,
    ) -> OpenFSDPEngine:
        config = EngineConfig(
            path=str(folder),
            backend=self.layout,
            dtype=self.dtype,
            init_from_scratch=self.init_from_scratch,
            mb_spec=self.micro_batches,
            fsdp=self.fsdp,
        )
        return OpenFSDPEngine(
            config,
            parse_backend(self.layout),
            seed=seed,
            optimizer=optimizer,
            total_steps=total_steps,
            timeout_s=120.0,
            value_head=value_head,
            value_bias=value_bias,
        )
