"""The processes that hold a model, to train or frozen: the worker's verbs, and how the driver deals batches to them.

driver   Trainer: plans who trains what     RemoteBatch ─> an order for every rank
rank     TrainerWorker: a training engine, and the reference model beside it where the two share processes
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from fivefold.algorithms.advantages import KLInReward
from fivefold.algorithms.loss import Loss
from fivefold.cluster.group import WorkerGroup
from fivefold.config.schema import EngineConfig, OptimizerConfig
from fivefold.engine.sharing import BatchPlan, BatchPlanner, Share
from fivefold.layout.grid import rank_grid
from fivefold.layout.parallel import ParallelLayout
from fivefold.roles.remote_batch import Piece, RemoteBatch, ShareOrder, assemble
from fivefold.sync.buckets import Bucket, pack
from fivefold.types import Columns

BUCKET_BYTES = 128 * 2**20
"""Weights travel to the rollout engines in pieces of this size."""

Model = Literal["own", "reference"]
"""Which of the models in a trainer's processes."""


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


@dataclass(frozen=True)
class UpdateResult:
    """What one optimizer step did, and the metrics of its loss."""

    metrics: dict[str, float]
    skipped: bool
    """The gradient was not finite, and no weight was changed."""
    non_finite: tuple[str, ...] = ()
    """The first few parameters whose gradient was not finite, if the step was skipped."""


class Trainer:
    """The driver's side: a group of `TrainerWorker`s, and the plan that deals batches to its replicas."""

    def __init__(self, group: WorkerGroup, planner: BatchPlanner) -> None:
        self.group = group
        self._planner = planner
        grid = rank_grid(planner.layout)
        self._replicas = [position.dp for position in grid]
        """The data-parallel replica of each rank."""
        self._first_ranks = [self._replicas.index(replica) for replica in range(planner.layout.dp)]
        """The first rank of each replica."""

    def deal(self, batch: RemoteBatch, *between: Any) -> tuple[BatchPlan, list[tuple[Any, ...]]]:
        """The plan of a mini-batch, and each rank's arguments: its order, `between`, and the columns that it needs."""
        plan = self._planner.plan(batch.lengths_N.tolist())
        orders = batch.orders(plan)
        arguments = [(order, *between, *columns) for order, columns in orders]
        return plan, [arguments[replica] for replica in self._replicas]

    def logprobs(self, batch: RemoteBatch, model: Model, temperature: float, column: str) -> tuple[Piece, ...]:
        """Log-probs of the trained tokens, under the name `column`: one piece for each replica."""
        plan, arguments = self.deal(batch, model, temperature, column)
        kept = self.group.keep_each(TrainerWorker.compute_logprobs, arguments)
        return tuple(
            Piece(kept[rank][1], np.array(plan.sequences(replica), dtype=np.int64))
            for replica, rank in enumerate(self._first_ranks)
        )

    def sum_logprobs(self, batch: RemoteBatch) -> float:
        """The sum of the log-probs of all trained tokens, at temperature 1."""
        _, arguments = self.deal(batch)
        sums = self.group.call_each(TrainerWorker.sum_logprobs, arguments)
        return sum(sums[rank] for rank in self._first_ranks)

    def release(self) -> None:
        """Give unused device memory back, for a role that shares the devices."""
        self.group.call(TrainerWorker.release_cache)


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
            spec.model,
            spec.layout,
            seed=spec.seed,
            optimizer=spec.optimizer,
            total_steps=spec.total_steps,
            timeout_s=spec.timeout_s,
        )
        self._tokenizer = spec.tokenizer
        self._reference = (
            MegatronEngine(spec.reference, spec.layout, seed=spec.seed) if spec.reference is not None else None
        )

    def compute_logprobs(
        self, order: ShareOrder, model: Model, temperature: float, column: str, *columns: Columns
    ) -> tuple[None, Columns]:
        """Log-probs of the share's trained tokens under one of these processes' models, under the name `column`."""
        engine = self._engine if model == "own" else self._reference
        if engine is None:
            raise ValueError("these processes hold no reference model: their TrainerSpec has none")
        share = assemble(order, columns)
        logprobs_T, _ = engine.compute_logprobs(share, temperature=temperature)
        return None, Columns(order.lengths.astype(np.int32), {column: logprobs_T.numpy()})

    def sum_logprobs(self, order: ShareOrder, *columns: Columns) -> float:
        """The sum of the log-probs of the replica's trained tokens, at temperature 1."""
        logprobs_T, _ = self._engine.compute_logprobs(assemble(order, columns), temperature=1.0)
        return float(logprobs_T.double().sum())

    def update(self, order: ShareOrder, loss: Loss, kl: KLInReward | None, *columns: Columns) -> UpdateResult:
        """One optimizer step on a mini-batch, whose advantages bear the KL penalty first if there is one."""
        share = assemble(order, columns)
        if kl is not None:
            share = replace(share, batch=kl.subtracted(share.batch))
        return self._update(share, loss)

    def _update(self, share: Share, loss: Loss) -> UpdateResult:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        metrics = self._engine.forward_backward(share, loss)
        step = self._engine.optim_step()
        if torch.cuda.is_available():
            metrics["peak_memory_gb/max"] = _largest_peak_gb()
        metrics |= {"grad_norm": step.grad_norm, "lr": step.learning_rate}
        return UpdateResult(metrics, step.skipped, step.non_finite)

    def offer_weights(self) -> Iterator[Bucket]:
        """All weights under their Hugging Face names, from rank 0; the others take part and yield nothing."""
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
