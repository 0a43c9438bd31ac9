"""The driver's handle of the processes that hold a model, trained or frozen.

driver   Trainer: plans each rank's share   RemoteBatch ─> an order for every rank
rank     TrainerWorker (`roles.trainer_worker`)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from fivefold.algorithms.gae import Moments
from fivefold.algorithms.loss import Loss
from fivefold.cluster.group import WorkerGroup
from fivefold.engine.scoring import N_APPENDED
from fivefold.engine.sharing import BatchPlan, BatchPlanner
from fivefold.layout.grid import rank_grid
from fivefold.roles.remote_batch import Piece, RemoteBatch
from fivefold.roles.trainer_worker import BatchChange, Model, TrainerWorker, UpdateResult, first_ranks

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
            reference_planner: plans those of the reference beside it; None: as those of the model.
        """
        self.group = group
        self._planner = planner
        self._reference_planner = reference_planner or planner
        self._replicas = [position.dp for position in rank_grid(planner.layout)]
        """The data-parallel replica of each rank."""
        self._first_ranks = first_ranks(planner.layout)

    def deal(
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
        plan = planner.plan((batch.lengths_N + n_appended).tolist(), with_gradient=with_gradient)
        orders = batch.orders(plan)
        arguments = [(order, *between, *columns) for order, columns in orders]
        return plan, [arguments[replica] for replica in self._replicas]

    def logprobs(self, batch: RemoteBatch, model: Model, temperature: float, column: str) -> tuple[Piece, ...]:
        """Compute log-probs of the trained tokens, as a column of the name `column`: one piece for each replica."""
        plan, arguments = self.deal(batch, model, temperature, column, model=model)
        return self.keep(TrainerWorker.compute_logprobs, plan, arguments)[0]

    def energies(self, batch: RemoteBatch, temperature: float) -> tuple[Piece, ...]:
        """Compute log-probs of the trained tokens and their energies, as the columns `old_logprobs` and `energies`."""
        plan, arguments = self.deal(batch, temperature)
        return self.keep(TrainerWorker.compute_energies, plan, arguments)[0]

    def top_k(self, batch: RemoteBatch, k: int, temperature: float) -> tuple[Piece, ...]:
        """Compute the k most likely tokens, as the columns `teacher_tokens` and `teacher_token_logprobs`."""
        plan, arguments = self.deal(batch, k, temperature)
        return self.keep(TrainerWorker.compute_top_k, plan, arguments)[0]

    def keep(
        self, method: Callable[..., tuple[R, Any]], plan: BatchPlan, arguments: Sequence[tuple[Any, ...]]
    ) -> tuple[tuple[Piece, ...], list[R]]:
        """Run a method that returns a summary and columns. Returns one piece and one summary for each replica.

        The columns stay in the object store, those of a replica once: its ranks all have the same.
        """
        kept = self.group.keep_each(method, arguments, self._first_ranks)
        pieces = tuple(
            Piece(columns, np.array(plan.sequences(replica), dtype=np.int64))
            for replica, (_, columns) in enumerate(kept)
        )
        return pieces, [summary for summary, _ in kept]

    def update(self, batch: RemoteBatch, loss: Loss, change: BatchChange | None = None) -> UpdateResult:
        """Make one optimizer step on a mini-batch; `change` is applied to each replica's part of it first."""
        _, arguments = self.deal(batch, loss, change, with_gradient=True)
        return self.group.call_each(TrainerWorker.update, arguments)[0]

    def advantage_moments(self, batch: RemoteBatch, change: BatchChange | None) -> Moments:
        """Return the moments of the advantages of all trained tokens, as they are after `change`."""
        _, arguments = self.deal(batch, change)
        moments = self.group.call_each(TrainerWorker.advantage_moments, arguments)
        return Moments.merged(moments[rank] for rank in self._first_ranks)

    def sum_logprobs(self, batch: RemoteBatch, model: Model) -> npt.NDArray[np.float64]:
        """Return, for each sequence, the sum of its trained tokens' log-probs at temperature 1: float64 [N], nats."""
        plan, arguments = self.deal(batch, model, model=model)
        return self._by_sequence(plan, self.group.call_each(TrainerWorker.sum_logprobs, arguments))

    def sum_values(self, batch: RemoteBatch) -> npt.NDArray[np.float64]:
        """Return, for each sequence, the sum of the values of the states before its trained tokens: float64 [N]."""
        plan, arguments = self.deal(batch)
        return self._by_sequence(plan, self.group.call_each(TrainerWorker.sum_values, arguments))

    def scores(self, batch: RemoteBatch, end_token: int) -> npt.NDArray[np.float64]:
        """Return, for each sequence, the value of the state behind its end token: float64 [N].

        Args:
            batch: the sequences.
            end_token: it is appended to sequences that lack it.
        """
        plan, arguments = self.deal(batch, end_token, n_appended=N_APPENDED)
        return self._by_sequence(plan, self.group.call_each(TrainerWorker.scores, arguments))

    def _by_sequence(self, plan: BatchPlan, sums: Sequence[list[float]]) -> npt.NDArray[np.float64]:
        """Return the number of each sequence of the batch, from those of each rank's share."""
        sequences = [index for replica in range(len(plan.replicas)) for index in plan.sequences(replica)]
        values_N = np.empty(len(sequences))
        values_N[sequences] = np.concatenate([sums[rank] for rank in self._first_ranks])
        return values_N

    def release(self) -> None:
        """Release cached device memory, for a role that shares the devices."""
        self.group.call(TrainerWorker.release_cache)
