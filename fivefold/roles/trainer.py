"""The driver's handle of the processes that hold a model, trained or frozen.

driver   Trainer: plans each rank's share   RemoteBatch ─> an order for every rank
rank     TrainerWorker (`roles.trainer_worker`)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from fivefold.algorithms.loss import Loss
from fivefold.batch import Columns
from fivefold.cluster.group import WorkerGroup, fetch
from fivefold.engine.heads import Score
from fivefold.engine.packing import BatchPlan, BatchPlanner
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
