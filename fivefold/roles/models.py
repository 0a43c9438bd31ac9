"""The driver's handles of models, and of the processes that hold them.

driver   ModelHandle: a model's turn on its devices
         Trainer: plans each rank's share          RemoteBatch ─> an order for every rank
rank     TrainerWorker (`roles.trainer_worker`)

One model works at a time on devices that several share:

    actor    ████████        ██████████████████
    critic           ████████                        `with critic.working("params")`

A frozen model may be asked by several threads, one at a time: in asynchronous training, a reward model scores while
others are updated, and in evaluations.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from fivefold.algorithms.loss import Loss
from fivefold.batch import Columns
from fivefold.cluster.group import WorkerGroup, fetch
from fivefold.engine.contract import Offloadable
from fivefold.engine.packing import BatchPlan, BatchPlanner
from fivefold.engine.scores import Score
from fivefold.layout.grid import rank_grid
from fivefold.roles.remote_batch import Piece, RemoteBatch
from fivefold.roles.trainer_worker import BatchChange, ColumnFunction, Model, TrainerWorker, UpdateResult, first_ranks

R = TypeVar("R")


class Trainer:
    """The driver's handle: a group of `TrainerWorker`s, and the planner that splits batches over its replicas."""

    def __init__(
        self, group: WorkerGroup, planner: BatchPlanner, reference_planner: BatchPlanner | None = None
    ) -> None:
        """Take the processes.

        Args:
            group: the processes.
            planner: plans the micro-batches of their model.
            reference_planner: plans the micro-batches of the reference in these processes; None: as `planner` does.
        """
        self.group = group
        self._planner = planner
        self._reference_planner = reference_planner or planner
        self._replicas = [position.dp for position in rank_grid(planner.layout)]
        """The data-parallel replica of each rank."""
        self._first_ranks = first_ranks(planner.layout)

    def _deal(
        self,
        batch: RemoteBatch,
        *between: Any,
        model: Model = "own",
        n_appended: int = 0,
        with_gradient: bool = False,
    ) -> tuple[BatchPlan, list[tuple[Any, ...]]]:
        """Plan a mini-batch. Returns the plan and each rank's arguments: its order, `between`, the columns it needs.

        Args:
            batch: the sequences.
            between: arguments of every rank.
            model: the model that works.
            n_appended: most tokens that the ranks append to a sequence.
            with_gradient: whether the pass computes gradients, for which activations are kept.
        """
        planner = self._planner if model == "own" else self._reference_planner
        lengths = (batch.lengths_N + n_appended).tolist()
        cuts = None if batch.cuts is None else tuple((*row[:-1], row[-1] + n_appended) for row in batch.cuts)
        plan = planner.plan(lengths, with_gradient=with_gradient, cuts=cuts)
        orders = batch.orders(plan)
        arguments = [(order, *between, *columns) for order, columns in orders]
        return plan, [arguments[replica] for replica in self._replicas]

    def score(self, batch: RemoteBatch, what: Score, model: Model = "own") -> tuple[Piece, ...]:
        """Compute a score of the trained tokens under `model`, as columns: one piece for each replica."""
        return self._score(batch, what, model, sums=False)

    def sums(self, batch: RemoteBatch, what: Score, model: Model = "own") -> npt.NDArray[np.float64]:
        """Return the sum over each sequence's trained tokens of a score with one column: float64 [N]."""
        values_N = np.empty(len(batch))
        for piece in self._score(batch, what, model, sums=True):
            columns: Columns = fetch(piece.columns)
            (values_N[piece.sequences_M],) = columns.values.values()
        return values_N

    def _score(self, batch: RemoteBatch, what: Score, model: Model, *, sums: bool) -> tuple[Piece, ...]:
        plan, arguments = self._deal(batch, what, model, sums, model=model, n_appended=what.n_appended)
        return self._keep(TrainerWorker.score, plan, arguments)[0]

    def compute(self, batch: RemoteBatch, function: ColumnFunction) -> tuple[tuple[Piece, ...], list[Any]]:
        """Run a function of each replica's sequences, without the model. Returns columns and summaries, by replica."""
        plan, arguments = self._deal(batch, function)
        return self._keep(TrainerWorker.compute, plan, arguments)

    def _keep(
        self, method: Callable[..., tuple[R, Any]], plan: BatchPlan, arguments: Sequence[tuple[Any, ...]]
    ) -> tuple[tuple[Piece, ...], list[R]]:
        """Run a method that returns a summary and columns. Returns one piece and one summary for each replica.

        The columns stay in the object store, one copy for each replica: its ranks all have the same.
        """
        kept = self.group.keep_each(method, arguments, self._first_ranks)
        pieces = tuple(
            Piece(columns, np.array(plan.sequences(replica), dtype=np.int64))
            for replica, (_, columns) in enumerate(kept)
        )
        return pieces, [summary for summary, _ in kept]

    def update(self, batch: RemoteBatch, loss: Loss, change: BatchChange | None = None) -> UpdateResult:
        """Make one optimizer step on a mini-batch; `change` is applied to each replica's part of it first."""
        _, arguments = self._deal(batch, loss, change, with_gradient=True)
        return self.group.call_each(TrainerWorker.update, arguments, [0])[0]

    def release(self) -> None:
        """Release cached device memory, for a role that shares the devices."""
        self.group.call(TrainerWorker.release_cache)


@dataclass
class MovedBytes:
    """Bytes that a model moves off its devices and back, of the rank that moves the most, since the last `take`."""

    freed: int = 0
    """Bytes of device memory that were freed."""
    restored: int = 0
    """Bytes of device memory that were allocated again."""

    def take(self) -> MovedBytes:
        """Return the counts, and count from zero again."""
        taken = MovedBytes(self.freed, self.restored)
        self.freed = self.restored = 0
        return taken


def moved_metrics(counts: Iterable[MovedBytes]) -> dict[str, float]:
    """Return the metrics of what several models have moved, in GB (1e9 bytes); none if nothing was moved."""
    moved = list(counts)
    freed, restored = sum(each.freed for each in moved), sum(each.restored for each in moved)
    if not freed and not restored:
        return {}
    return {"offload/freed_gb": freed / 1e9, "offload/restored_gb": restored / 1e9}


@dataclass(frozen=True)
class Turn:
    """When a model has its devices, and what moves for it."""

    away: tuple[Offloadable, ...] = ()
    """What is off the devices while the model does not work."""
    neighbour: ModelHandle | None = None
    """The model that is trained on the same devices; None: no model is."""
    makes_room: tuple[Offloadable, ...] = ()
    """What the neighbour moves off them while the model works."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    """Held by the thread whose model works on devices that several models have in turn."""


class ModelHandle:
    """A model in its processes, and its turn on their devices."""

    def __init__(self, trainer: Trainer, turn: Turn | None = None) -> None:
        """Take the processes; without a turn, the model has its devices always."""
        self.trainer = trainer
        self._turn = turn or Turn()
        self.moved = MovedBytes()
        """What was moved off the devices and back since the counts were taken."""

    @property
    def in_turn(self) -> threading.RLock:
        """Held by the thread whose model works on devices that several models have in turn."""
        return self._turn.lock

    @property
    def away(self) -> tuple[Offloadable, ...]:
        """What is off the devices while the model does not work."""
        return self._turn.away

    def leave_with(self, kind: Offloadable) -> None:
        """Have one more part of the state off the devices while the model does not work, from the next time on."""
        self._turn = replace(self._turn, away=(*self._turn.away, kind))

    @contextmanager
    def working(self, *needed: Offloadable) -> Iterator[Trainer]:
        """Give the model its devices inside the block, once no other thread's model works there.

        Args:
            needed: what of its state must be on the devices.
        """
        away, neighbour, makes_room = self._turn.away, self._turn.neighbour, self._turn.makes_room
        with self.in_turn:
            if neighbour is not None:
                neighbour.offload(makes_room)
                neighbour.release()
            self.onload([kind for kind in away if kind in needed])
            yield self.trainer
            self.offload(away)
            if away or neighbour is not None:
                self.release()
            if neighbour is not None:
                neighbour.onload(makes_room)

    def offload(self, what: Sequence[Offloadable]) -> None:
        """Move state off the devices."""
        if what:
            self.moved.freed += max(self.trainer.group.call(TrainerWorker.offload, what))

    def onload(self, what: Sequence[Offloadable]) -> None:
        """Bring back what `offload` moved; what is on the devices stays there."""
        if what:
            self.moved.restored += max(self.trainer.group.call(TrainerWorker.onload, what))

    def release(self) -> None:
        """Release cached device memory, for a role that shares the devices."""
        self.trainer.release()

    def free_memory(self) -> int | None:
        """Return the free bytes of the fullest device, whoever has the others; None: no GPUs."""
        return min(
            (free for free in self.trainer.group.call(TrainerWorker.free_memory) if free is not None), default=None
        )


class TrainedModel(ModelHandle):
    """A model that is trained."""

    def score(self, batch: RemoteBatch, what: Score) -> tuple[Piece, ...]:
        """Compute a score of the trained tokens under the current weights, as columns."""
        return self.trainer.score(batch, what)

    def sums(self, batch: RemoteBatch, what: Score) -> npt.NDArray[np.float64]:
        """Return the sum over each sequence's trained tokens of a score with one column: float64 [N]."""
        return self.trainer.sums(batch, what)

    def update(self, batch: RemoteBatch, loss: Loss, change: BatchChange | None = None) -> UpdateResult:
        """Make one optimizer step on a mini-batch; `change` is applied to each replica's part of it first."""
        return self.trainer.update(batch, loss, change)

    def device_names(self) -> list[str | None]:
        """Return the name of each process's GPU; None for a CPU process."""
        return self.trainer.group.call(TrainerWorker.device_name)

    def save(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder."""
        self.trainer.group.call_first(TrainerWorker.save, folder)
