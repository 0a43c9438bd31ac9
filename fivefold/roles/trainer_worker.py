"""The worker of a model, trained or frozen, in each of its processes, and what it is built from.

It holds a training engine, and the reference model beside it where the two share processes.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from fivefold.algorithms.gae import GAE, EstimateMoments, Moments
from fivefold.algorithms.kl_in_reward import KLInReward
from fivefold.algorithms.loss import Loss
from fivefold.config.schema.engine import EngineConfig, OptimizerConfig
from fivefold.config.schema.run import ProfileConfig
from fivefold.engine.compat import share_gloo_devices
from fivefold.engine.contract import PARAMS, Offloadable, TrainingEngine
from fivefold.engine.peak_memory import UPDATE, PeakMemory
from fivefold.engine.profiling import Recording
from fivefold.engine.scoring import for_scoring
from fivefold.engine.sharing import Share
from fivefold.layout.grid import rank_grid
from fivefold.layout.parallel import ParallelLayout
from fivefold.roles.engines import build_engine
from fivefold.roles.remote_batch import ShareOrder, assemble
from fivefold.roles.weight_sending import SendsWeights
from fivefold.types import Batch, Columns
from fivefold.weights.buckets import Bucket, unpack

if TYPE_CHECKING:
    from fivefold.engine.contract import Snapshot
    from fivefold.engine.ema import EMAWeights
    from fivefold.engine.state.dcp_files import WrittenPart

BatchChange = Callable[[Batch], Batch]
"""Changes the fields of a replica's sequences before they are trained on; it can be pickled."""

Result = TypeVar("Result")

_PHASES = {"old_logprobs": "old log-probs", "ref_logprobs": "reference"}
"""Phases of a step that compute columns of these names."""

Model = Literal["own", "reference"]
"""A model in the trainer's processes: its own, or the reference beside it."""


@dataclass(frozen=True)
class TrainerSpec:
    """What to build in each process of a role."""

    model: EngineConfig
    layout: ParallelLayout
    seed: int
    timeout_s: float
    """Longest time, in seconds, that a collective may wait for another rank."""
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer to save with the model; None: the model's own."""
    optimizer: OptimizerConfig | None = None
    """Hyper-parameters; None: the model is not trained."""
    total_steps: int = 1
    """Optimizer steps of the run."""
    reference: EngineConfig | None = None
    """A second, frozen model in the same processes and the same layout."""
    offloads_reference: bool = False
    """Whether the second model's weights are on the devices only while it works."""
    ema_decay: float | None = None
    """Decay with which the frozen model follows a trained one (`EMAWeights`); None: its weights never change. The
    frozen model is the reference, or `model` itself without one."""
    value_head: bool = False
    """Whether the model has a value head in place of its output layer."""
    value_bias: bool = True
    """Whether that head has a bias: a critic's has, a reward model's has not."""
    copies_state: bool = True
    """Whether state is copied to host memory for a checkpoint; False: it is written while training waits."""


@dataclass(frozen=True)
class UpdateResult:
    """Result of one optimizer step, and the metrics of its loss."""

    metrics: dict[str, float]
    skipped: bool
    """Whether no weight was changed, because the gradient was not finite."""
    non_finite: tuple[str, ...] = ()
    """The first few parameters whose gradient was not finite, if the step was skipped."""
    n_trained: int = 1
    """Trained tokens of the mini-batch, by which its means over tokens count among those of other updates."""


@dataclass(frozen=True)
class WriteFailed:
    """A rank could not write its part of a snapshot."""

    rank: int
    host: str
    reason: str


def first_ranks(layout: ParallelLayout) -> list[int]:
    """Return the first rank of each data-parallel replica."""
    replicas = [position.dp for position in rank_grid(layout)]
    return [replicas.index(replica) for replica in range(layout.dp)]


class TrainerWorker(SendsWeights):
    """One rank of a trained or frozen model. All ranks take part in every method."""

    def __init__(self, spec: TrainerSpec) -> None:
        backend = "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(0)  # the only device that this process sees
            backend = "nccl"
        else:
            share_gloo_devices()
        dist.init_process_group(backend, init_method="env://", timeout=timedelta(seconds=spec.timeout_s))
        engine = build_engine(
            spec.model,
            spec.layout,
            seed=spec.seed,
            optimizer=spec.optimizer,
            total_steps=spec.total_steps,
            timeout_s=spec.timeout_s,
            value_head=spec.value_head,
            value_bias=spec.value_bias,
        )
        super().__init__(engine, spec.timeout_s)
        self._recording: Recording | None = None
        self._peaks = PeakMemory()
        self._tokenizer = spec.tokenizer
        self._first_ranks = first_ranks(spec.layout)
        self._copies_state = spec.copies_state
        self._snapshot: Snapshot | None = None
        self._reference: TrainingEngine | None = (
            build_engine(spec.reference, spec.layout, seed=spec.seed, timeout_s=spec.timeout_s)
            if spec.reference is not None
            else None
        )
        self._offloads_reference = spec.offloads_reference
        self._ema: EMAWeights | None = None
        self._ema_snapshot: Snapshot | None = None
        if spec.ema_decay is not None:
            self._ema = (self._reference or self._engine).ema_weights(spec.ema_decay)
        if self._reference is not None and spec.offloads_reference:
            self._reference.offload(PARAMS)

    def effective_config(self) -> dict[str, Any]:
        """Return the whole configuration of the library that the model runs on."""
        return self._engine.effective_config()

    def device_name(self) -> str | None:
        """Return the name of this process's GPU; None for a CPU process."""
        return torch.cuda.get_device_name() if torch.cuda.is_available() else None

    def compute_logprobs(
        self, order: ShareOrder, model: Model, temperature: float, column: str, *columns: Columns
    ) -> tuple[None, Columns]:
        """Compute log-probs of the share's trained tokens under `model`, as a column of the name `column`.

        Returns:
            No summary, and the columns.

        Raises:
            ValueError: `model` is the reference, which these processes do not hold.
        """
        share = assemble(order, columns)
        with self._working(model) as engine, self._peaks.phase(_PHASES.get(column, column)):
            logprobs_T, _ = engine.compute_logprobs(share, temperature=temperature)
        return None, Columns(order.lengths.astype(np.int32), {column: logprobs_T.numpy()})

    def compute_energies(self, order: ShareOrder, temperature: float, *columns: Columns) -> tuple[None, Columns]:
        """Compute log-probs of the share's trained tokens, as the column `old_logprobs`, and their energies.

        The column `energies` has 1 - 2 p + the sum of squared probabilities on trained tokens, and NaN on others.

        Returns:
            No summary, and the columns.
        """
        share = assemble(order, columns)
        with self._peaks.phase(_PHASES["old_logprobs"]):
            logprobs_T, squares_T = self._engine.compute_squares(share, temperature=temperature)
        energies_T = (1 - 2 * logprobs_T.exp() + squares_T).clamp(min=0)
        energies_T[~share.batch.mask_T.bool()] = torch.nan
        values = {"old_logprobs": logprobs_T.numpy(), "energies": energies_T.numpy()}
        return None, Columns(order.lengths.astype(np.int32), values)

    def compute_top_k(self, order: ShareOrder, k: int, temperature: float, *columns: Columns) -> tuple[None, Columns]:
        """Compute the k most likely tokens at each of the share's trained tokens, as columns of a teacher.

        Returns:
            No summary, and the columns.
        """
        tokens_TK, logprobs_TK = self._engine.compute_top_k(assemble(order, columns), k, temperature=temperature)
        values = {"teacher_tokens": tokens_TK.int().numpy(), "teacher_token_logprobs": logprobs_TK.numpy()}
        return None, Columns(order.lengths.astype(np.int32), values)

    def sum_logprobs(self, order: ShareOrder, model: Model, *columns: Columns) -> list[float]:
        """Return, for each sequence of the share, the sum of its trained tokens' log-probs at temperature 1.

        Raises:
            ValueError: `model` is the reference, which these processes do not hold.
        """
        share = assemble(order, columns)
        with self._working(model) as engine:
            logprobs_T, _ = engine.compute_logprobs(share, temperature=1.0)
        return _sums(share.batch, logprobs_T)

    def sum_values(self, order: ShareOrder, *columns: Columns) -> list[float]:
        """Return, for each sequence of the share, the sum of the values of the states before its trained tokens."""
        share = assemble(order, columns)
        return _sums(share.batch, self._engine.compute_values(share))

    def scores(self, order: ShareOrder, end_token: int, *columns: Columns) -> list[float]:
        """Return, for each sequence of the share, the value of the state behind its end token."""
        share = assemble(order, columns)
        share = replace(share, batch=for_scoring(share.batch, end_token))
        return _sums(share.batch, self._engine.compute_values(share))

    @contextmanager
    def _working(self, model: Model) -> Iterator[TrainingEngine]:
        """Yield the engine of a model, whose weights are on the devices inside the block."""
        engine = self._engine if model == "own" else self._reference
        if engine is None:
            raise ValueError("these processes hold no reference model: their TrainerSpec has none")
        is_away = model == "reference" and self._offloads_reference
        if is_away:
            engine.onload(PARAMS)
        yield engine
        if is_away:
            engine.offload(PARAMS)

    def follow_own(self) -> None:
        """Let the reference follow the trained model in the same processes.

        Raises:
            ValueError: no model of these processes follows another.
        """
        with self._working("reference"):
            self._require_ema().follow(self._engine.held_weights())

    def follow(self, buckets: Iterator[Bucket]) -> None:
        """Let the model follow the weights in `buckets`, which a trained model's `offer_weights` yields.

        Raises:
            ValueError: no model of these processes follows another.
        """
        self._require_ema().follow_whole(unpack(buckets, torch.device("cpu")))

    def snapshot_ema(self, folder: Path) -> WriteFailed | None:
        """Copy this rank's part of the model that follows to host memory, for `write_ema`; see `snapshot`."""
        ema = self._require_ema()
        with self._working("own" if self._reference is None else "reference"):
            snapshot = _unless_failed(lambda: ema.snapshot(folder, copy=self._copies_state))
        if isinstance(snapshot, WriteFailed):
            return snapshot
        self._ema_snapshot = snapshot
        return None

    def write_ema(self) -> WrittenPart | WriteFailed:
        """Write the files of the last `snapshot_ema`; see `write_snapshot`."""
        return _written(self._ema_snapshot)

    def load_ema(self, folder: Path) -> None:
        """Load the weights of the model that follows from `folder`."""
        with self._working("own" if self._reference is None else "reference"):
            self._require_ema().load(folder)

    def _require_ema(self) -> EMAWeights:
        if self._ema is None:
            raise ValueError("no model of these processes follows another: set ema_decay of their TrainerSpec")
        return self._ema

    def compute_values(self, order: ShareOrder, *columns: Columns) -> tuple[None, Columns]:
        """Compute the values of the states before the share's trained tokens, as the column `values`.

        Returns:
            No summary, and the columns.
        """
        with self._peaks.phase("values"):
            values_T = self._engine.compute_values(assemble(order, columns))
        return None, Columns(order.lengths.astype(np.int32), {"values": values_T.numpy()})

    def estimate_advantages(
        self, order: ShareOrder, gae: GAE, kl: KLInReward | None, *columns: Columns
    ) -> tuple[EstimateMoments, Columns]:
        """Estimate the advantages and the returns of the share's trained tokens, as columns of these names.

        Args:
            order: the share.
            gae: the constants of the estimate.
            kl: a penalty in the reward of each token; None: there is none.
            columns: columns with the values, and the log-probs that `kl` needs.

        Returns:
            The moments of the share's estimates, and the columns.
        """
        batch = assemble(order, columns).batch
        advantages_T, returns_T = gae.estimate(batch, None if kl is None else -kl.kl_ctl * kl.estimate(batch))
        values = {"advantages": advantages_T.numpy(), "returns": returns_T.numpy()}
        moments = EstimateMoments.of(batch.with_fields(advantages=advantages_T, returns=returns_T))
        return moments, Columns(order.lengths.astype(np.int32), values)

    def advantage_moments(self, order: ShareOrder, change: BatchChange | None, *columns: Columns) -> Moments:
        """Return the moments of the advantages of the share's trained tokens, as they are after `change`."""
        batch = assemble(order, columns).batch
        batch = batch if change is None else change(batch)
        return Moments.of(batch.fields["advantages"][batch.mask_T.bool()])

    def update(self, order: ShareOrder, loss: Loss, change: BatchChange | None, *columns: Columns) -> UpdateResult:
        """Make one optimizer step on a mini-batch; `change` is applied to this replica's part of it first."""
        share = assemble(order, columns)
        if change is not None:
            share = replace(share, batch=change(share.batch))
        if loss.before is not None:
            share = replace(share, batch=loss.before(share.batch, self._gather))
        return self._update(share, loss)

    def _gather(self, own: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all data-parallel replicas; all ranks of a replica give the same one."""
        gathered: list[torch.Tensor | None] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, own)
        return [tensor for rank, tensor in enumerate(gathered) if tensor is not None and rank in self._first_ranks]

    def _update(self, share: Share, loss: Loss) -> UpdateResult:
        with self._peaks.phase(UPDATE):
            metrics = self._engine.forward_backward(share, loss)
            step = self._engine.optim_step()
        metrics |= self._peaks.take()
        metrics |= {"grad_norm": step.grad_norm, "lr": step.learning_rate}
        return UpdateResult(metrics, step.skipped, step.non_finite, share.totals.n_trained_tokens)

    def save(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder."""
        self._engine.save_hf(folder, self._tokenizer)

    def snapshot(self, folder: Path) -> WriteFailed | None:
        """Copy this rank's training state to host memory, for `write_snapshot` to write it below `folder`.

        Without a copy (`TrainerSpec.copies_state`) it is written at once, and `write_snapshot` only tells what was.

        Returns:
            A failure of the file system, because an exception would end the run; None: there was none.
        """
        snapshot = _unless_failed(lambda: self._engine.snapshot(folder, copy=self._copies_state))
        if isinstance(snapshot, WriteFailed):
            return snapshot
        self._snapshot = snapshot
        return None

    def write_snapshot(self) -> WrittenPart | WriteFailed:
        """Write the files of the last snapshot; it runs beside other methods, and may be repeated after a failure.

        A failure of the file system is a result, because an exception would end the run at once.

        Raises:
            ValueError: there is no snapshot.
        """
        return _written(self._snapshot)

    def load_state(self, folder: Path) -> None:
        """Load the training state below `folder`, in place of the model's weights."""
        self._engine.load(folder)

    def offload(self, what: Collection[Offloadable]) -> int:
        """Move state of this rank off its device, and the weights of the reference beside it with the model's own.

        Returns:
            The bytes that were freed.
        """
        freed = self._engine.offload(what)
        if self._reference is not None and "params" in what:
            freed += self._reference.offload(PARAMS)
        return freed

    def onload(self, what: Collection[Offloadable]) -> int:
        """Bring back what `offload` moved. Returns the bytes that were allocated on the device."""
        allocated = self._engine.onload(what)
        if self._reference is not None and "params" in what and not self._offloads_reference:
            allocated += self._reference.onload(PARAMS)
        return allocated

    def start_profile(self, config: ProfileConfig) -> None:
        """Begin to record what this rank does, if it is one of those that record."""
        if dist.get_rank() in config.ranks:
            self._recording = Recording(memory=config.memory)

    def write_profile(self, folder: Path) -> None:
        """Write what was recorded since `start_profile` to `folder`, as `rank-<n>.trace.json.gz`.

        Raises:
            OSError: a file cannot be written.
        """
        if self._recording is not None:
            self._recording.write(folder / f"rank-{dist.get_rank()}")
            self._recording = None

    def release_cache(self) -> None:
        """Release cached device memory, for the role that shares the device."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def free_memory(self) -> int | None:
        """Return the free bytes of this rank's device, whoever has the others; None: it is no GPU."""
        return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else None


def _written(snapshot: Snapshot | None) -> WrittenPart | WriteFailed:
    """Write the files of a snapshot."""
    if snapshot is None:
        raise ValueError("there is nothing to write: take a snapshot first")
    return _unless_failed(snapshot.write)


def _unless_failed(action: Callable[[], Result]) -> Result | WriteFailed:
    """Return what `action` returns, or the failure of the file system with which it ends."""
    try:
        return action()
    except OSError as error:
        return WriteFailed(dist.get_rank(), socket.gethostname(), str(error))


def _sums(batch: Batch, values_T: torch.Tensor) -> list[float]:
    """Return the sum of the values of each sequence, in float64."""
    return [float(values.double().sum()) for values in batch.split(values_T)]
