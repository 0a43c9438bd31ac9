"""The worker of a model, trained or frozen: one in each of its processes.

It holds a training engine, and the engine of a reference model that shares the processes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from fivefold.algorithms.loss import Loss
from fivefold.algorithms.metrics import Metric, Metrics
from fivefold.batch import Batch, Columns
from fivefold.config.schema.engine import EngineConfig
from fivefold.engine.compat import share_gloo_devices
from fivefold.engine.contract import PARAMS, EngineOptions, Offloadable, TrainingEngine
from fivefold.engine.metrics import UPDATE, PeakMemory
from fivefold.engine.scores import Score
from fivefold.layout.grid import rank_grid
from fivefold.layout.parallel import ParallelLayout
from fivefold.roles.engines import build_engine
from fivefold.roles.remote_batch import ShareOrder, assemble

BatchChange = Callable[[Batch], Batch]
"""Changes the fields of a replica's sequences before they are trained on; it can be pickled."""

ColumnFunction = Callable[[Batch], tuple[Any, dict[str, torch.Tensor]]]
"""Makes a summary and columns [T] of a replica's sequences; it can be pickled."""

_PHASES = {"old_logprobs": "old log-probs", "ref_logprobs": "reference", "values": "values"}
"""Phases of a step, whose peak memory is measured, by the name of the score that they compute."""

Model = Literal["own", "reference"]
"""A model in the trainer's processes: its own, or the reference that shares them."""


@dataclass(frozen=True)
class TrainerSpec:
    """What to build in each process of a role."""

    model: EngineConfig
    layout: ParallelLayout
    options: EngineOptions
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer to save with the model; None: the model's own."""
    reference: EngineConfig | None = None
    """A second, frozen model in the same processes and the same layout."""
    reference_is_base: bool = False
    """Whether the model without its adapters is the reference, so that there is no second one."""
    offloads_reference: bool = False
    """Whether the second model's weights are on the devices only while it works."""
    ema_decay: float | None = None
    """Decay with which the frozen model follows a trained one (`EMAWeights`); None: its weights never change. The
    frozen model is the reference, or `model` itself without one."""
    copies_state: bool = True
    """Whether state is copied to host memory for a checkpoint; False: it is written while training waits."""


@dataclass(frozen=True)
class UpdateResult:
    """Result of one optimizer step, and the metrics of its loss."""

    metrics: Metrics
    skipped: bool
    """Whether no weight was changed, because the gradient was not finite, even of a loss without a factor."""
    non_finite: tuple[str, ...] = ()
    """The first few parameters whose gradient was not finite, if the step was skipped."""


def first_ranks(layout: ParallelLayout) -> list[int]:
    """Return the first rank of each data-parallel replica."""
    replicas = [position.dp for position in rank_grid(layout)]
    return [replicas.index(replica) for replica in range(layout.dp)]


class TrainerWorker:
    """One rank of a trained or frozen model. All ranks take part in every method.

    What only some runs call is in parts of it (`cluster.role.Part`): `Snapshots`, `EMA`, `Profiler`, `SendsWeights`.
    """

    def __init__(self, spec: TrainerSpec) -> None:
        backend = "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(0)  # the only device that this process sees
            backend = "nccl"
        else:
            share_gloo_devices()
        dist.init_process_group(backend, init_method="env://", timeout=timedelta(seconds=spec.options.timeout_s))
        self.spec = spec
        self.engine = build_engine(spec.model, spec.layout, spec.options)
        self._reference: TrainingEngine | None = None
        if spec.reference is not None:
            options = EngineOptions(seed=spec.options.seed, timeout_s=spec.options.timeout_s)
            self._reference = build_engine(spec.reference, spec.layout, options)
            if spec.offloads_reference:
                self._reference.offload(PARAMS)
        self._peaks = PeakMemory()

    def effective_config(self) -> dict[str, Any]:
        """Return the whole configuration of the library that the model runs on."""
        return self.engine.effective_config()

    def device_name(self) -> str | None:
        """Return the name of this process's GPU; None for a CPU process."""
        return torch.cuda.get_device_name() if torch.cuda.is_available() else None

    def score(
        self, order: ShareOrder, what: Score, model: Model, sums: bool, *columns: Columns
    ) -> tuple[None, Columns]:
        """Compute a score of the share's trained tokens under `model`.

        Args:
            order: the share.
            what: the score.
            model: the model that works.
            sums: whether to return, in place of each column [T], its sum over each sequence, float64 [sequences].
            columns: columns with the share's tokens, and what the score reads besides.

        Returns:
            No summary, and the columns.

        Raises:
            ValueError: `model` is the reference, which these processes do not hold.
        """
        share = assemble(order, columns)
        share = replace(share, batch=what.lay_out(share.batch))
        phase = None if sums else _PHASES.get(what.name)
        with self.working(model) as engine, self._peaks.phase(phase) if phase else nullcontext():
            scored = engine.score(share, what)
        if sums:
            n = len(share.batch.lengths)
            return None, Columns(np.ones(n, np.int32), {name: _sums(share.batch, row) for name, row in scored.items()})
        return None, Columns(order.lengths.astype(np.int32), {name: row.numpy() for name, row in scored.items()})

    def compute(self, order: ShareOrder, function: ColumnFunction, *columns: Columns) -> tuple[Any, Columns]:
        """Return what `function` makes of this replica's sequences, without the model: its summary, and columns."""
        summary, values = function(assemble(order, columns).batch)
        return summary, Columns(order.lengths.astype(np.int32), {name: row.numpy() for name, row in values.items()})

    @contextmanager
    def working(self, model: Model) -> Iterator[TrainingEngine]:
        """Yield the engine of a model, whose weights are on the devices inside the block.

        Raises:
            ValueError: `model` is the reference, which these processes do not hold.
        """
        if model == "reference" and self.spec.reference_is_base:
            with self.engine.without_adapters():
                yield self.engine
            return
        engine = self.engine if model == "own" else self._reference
        if engine is None:
            raise ValueError("these processes hold no reference model: their TrainerSpec has none")
        is_away = model == "reference" and self.spec.offloads_reference
        if is_away:
            engine.onload(PARAMS)
        yield engine
        if is_away:
            engine.offload(PARAMS)

    def update(self, order: ShareOrder, loss: Loss, change: BatchChange | None, *columns: Columns) -> UpdateResult:
        """Make one optimizer step on a mini-batch; `change` is applied to this replica's part of it first."""
        share = assemble(order, columns)
        if change is not None:
            share = replace(share, batch=change(share.batch))
        if loss.before is not None:
            share = replace(share, batch=loss.before(share.batch, self._gather))
        with self._peaks.phase(UPDATE):
            metrics = self.engine.forward_backward(share, loss)
            step = self.engine.optim_step()
        metrics |= self._peaks.take()
        metrics |= {
            "grad_norm": Metric(step.grad_norm),
            "lr": Metric(step.learning_rate, reduce="last"),
            "skipped_updates": Metric(float(step.skipped), reduce="sum"),
        }
        if step.loss_scale is not None:
            metrics["loss_scale"] = Metric(step.loss_scale, reduce="last")
        return UpdateResult(metrics, step.skipped and not step.was_scaled, step.non_finite)

    def _gather(self, own: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors on the CPU of all data-parallel replicas; all ranks of a replica give the same one."""
        gathered: list[Any] = [None] * self.engine.peers.size()
        # As an array, because a tensor takes ten times as long to unpickle.
        dist.all_gather_object(gathered, own.numpy(), group=self.engine.peers)
        return [torch.from_numpy(values) for values in gathered]

    def save(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder, and its adapters as one of PEFT in it."""
        self.engine.save_hf(folder, self.spec.tokenizer)
        if self.spec.options.adapters is not None:
            self.engine.save_adapters(folder / "adapter")

    def offload(self, what: Collection[Offloadable]) -> int:
        """Move state of this rank off its device, and the reference's weights with the model's own.

        Returns:
            The bytes that were freed.
        """
        freed = self.engine.offload(what)
        if self._reference is not None and "params" in what:
            freed += self._reference.offload(PARAMS)
        return freed

    def onload(self, what: Collection[Offloadable]) -> int:
        """Bring back what `offload` moved. Returns the bytes that were allocated on the device."""
        allocated = self.engine.onload(what)
        if self._reference is not None and "params" in what and not self.spec.offloads_reference:
            allocated += self._reference.onload(PARAMS)
        return allocated

    def release_cache(self) -> None:
        """Release cached device memory, for the role that shares the device."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def free_memory(self) -> int | None:
        """Return the free bytes of this rank's device, whoever uses the others; None: it is not a GPU."""
        return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else None


def _sums(batch: Batch, values_T: torch.Tensor) -> npt.NDArray[np.float64]:
    """Return the sum of the values of each sequence, in float64."""
    return np.array([float(values.double().sum()) for values in batch.split(values_T)])
