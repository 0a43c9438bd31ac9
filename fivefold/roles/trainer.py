"""What a process of the actor or of the reference model holds: a Megatron engine, and the reference's beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fivefold.algorithms.loss import Loss
from fivefold.config.schema import EngineConfig, OptimizerConfig
from fivefold.layout.parallel import ParallelLayout
from fivefold.sync.buckets import Bucket, pack
from fivefold.types import Batch

BUCKET_BYTES = 128 * 2**20
"""Weights travel to the rollout engines in pieces of this size."""


@dataclass(frozen=True)
class TrainerSpec:
    """What to build in the processes of a role."""

    model: EngineConfig
    layout: ParallelLayout
    seed: int
    timeout_s: float
    """Longest time, in seconds, that a collective may wait for another rank."""
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer that belongs to the model; None: its own."""
    optimizer: OptimizerConfig | None = None
    """None: the model is not trained."""
    total_steps: int = 1
    """Optimizer steps of the run."""
    reference: EngineConfig | None = None
    """A second, frozen model in the same processes and the same layout."""


class TrainerWorker:
    """The verbs of the trainer's side of the loop. All ranks take part in each."""

    def __init__(self, spec: TrainerSpec) -> None:
        # The environment, set by the worker's shell, says who takes part.
        from fivefold.mcore.engine import MegatronEngine

        backend = "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(0)  # of the one device that this process sees
            backend = "nccl"
        dist.init_process_group(backend, init_method="env://", timeout=timedelta(seconds=spec.timeout_s))
        self._engine = MegatronEngine(
            spec.model, spec.layout, seed=spec.seed, optimizer=spec.optimizer, total_steps=spec.total_steps
        )
        self._tokenizer = spec.tokenizer
        self._reference = (
            MegatronEngine(spec.reference, spec.layout, seed=spec.seed) if spec.reference is not None else None
        )

    def compute_logprobs(self, batch: Batch, temperature: float) -> torch.Tensor:
        """float32 [T]: log-probs of the trained tokens under the model."""
        return self._engine.compute_logprobs(batch, temperature=temperature)[0]

    def compute_reference_logprobs(self, batch: Batch, temperature: float) -> torch.Tensor:
        """float32 [T]: log-probs of the trained tokens under the reference model of these processes."""
        if self._reference is None:
            raise ValueError("these processes hold no reference model: their TrainerSpec has none")
        return self._reference.compute_logprobs(batch, temperature=temperature)[0]

    def update(self, batch: Batch, loss: Loss) -> dict[str, Any]:
        """One optimizer step on `batch`. Returns the loss's metrics and what the step did."""
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        metrics = self._engine.forward_backward(batch, loss)
        step = self._engine.optim_step()
        if torch.cuda.is_available():
            metrics["peak_memory_gb/max"] = _largest_peak_gb()
        return {"metrics": metrics, "step": step}

    def weight_buckets(self) -> Iterator[Bucket]:
        """All weights under their Hugging Face names."""
        weights = self._engine.export_weights()
        if dist.get_rank() == 0:
            yield from pack(weights, BUCKET_BYTES)
        else:
            for _ in weights:
                yield from ()

    def save(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder."""
        self._engine.save_hf(folder, self._tokenizer)

    def release_cache(self) -> None:
        """Give unused device memory back, for the engine that shares the device."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _largest_peak_gb() -> float:
    """Most device memory that any rank had in tensors, in 1e9 bytes."""
    peak = torch.tensor(torch.cuda.max_memory_allocated() / 1e9, device="cuda")
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return float(peak)
