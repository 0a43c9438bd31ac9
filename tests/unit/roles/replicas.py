"""Data-parallel replicas as threads of this process, which train a model of bigrams: a row of logits after each token.

Everything but the model and its optimizer is real: shares, losses, what is computed before them, columns and plans.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fivefold.algorithms.distillation import coarse_divergence
from fivefold.algorithms.loss import Loss, LossInputs
from fivefold.algorithms.metrics import Metrics
from fivefold.algorithms.policy_loss import PolicyLoss
from fivefold.batch import Batch
from fivefold.config.schema.engine import MicroBatchConfig
from fivefold.engine.contract import StepResult
from fivefold.engine.distillation import TopK
from fivefold.engine.energies import Energies
from fivefold.engine.entropy_changes import EntropyChanges
from fivefold.engine.metrics import PeakMemory
from fivefold.engine.packing import BatchPlanner, Share
from fivefold.engine.scores import Logprobs, Score
from fivefold.engine.values import Values
from fivefold.layout.parser import parse_backend
from fivefold.roles import models, remote_batch
from fivefold.roles.models import Trainer
from fivefold.roles.trainer_worker import TrainerWorker
from fivefold.update import token_advantages

VOCAB = 11
RATE = 0.05


class Bigrams:
    """Logits of the next token, or its value, by the token before it."""

    def __init__(self, seed: int, *, is_critic: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        width = 1 if is_critic else VOCAB
        self.weight = torch.randn(VOCAB, width, generator=generator, dtype=torch.float64).requires_grad_()
        self.gradients: list[torch.Tensor] = []
        """The gradient of each update."""

    def step(self, gradient: torch.Tensor) -> None:
        self.gradients.append(gradient)
        self.weight.data -= RATE * gradient


class Engine:
    """One replica's engine."""

    def __init__(self, model: Bigrams) -> None:
        self._model = model
        self.gradient = torch.zeros(())

    def _rows(self, batch: Batch, temperature: float) -> torch.Tensor:
        return self._model.weight[batch.tokens_T.roll(1)] / temperature

    def _predictions(self, batch: Batch, temperature: float) -> dict[str, torch.Tensor]:
        rows = self._rows(batch, temperature)
        if rows.shape[1] == 1:
            predictions = {"values": rows.squeeze(1)}
        else:
            log_p = rows.log_softmax(1)
            entropy = -(log_p.exp() * log_p).sum(1)
            predictions = {"logprobs": log_p.gather(1, batch.tokens_T[:, None]).squeeze(1), "entropy": entropy}
        return {name: torch.where(batch.mask_T.bool(), rows.float(), 0.0) for name, rows in predictions.items()}

    @torch.no_grad()
    def score(self, share: Share, what: Score) -> dict[str, torch.Tensor]:
        batch = share.batch
        if isinstance(what, Values):
            rows = list(self._predictions(batch, 1.0).values())
        else:
            assert isinstance(what, Logprobs | TopK)
            log_p = self._rows(batch, what.temperature).log_softmax(1)
            if isinstance(what, TopK):
                best = log_p.topk(what.k)
                rows = [*best.indices.T.float(), *best.values.T.float()]
            else:
                rows = list(self._predictions(batch, what.temperature).values())
                if isinstance(what, Energies):
                    rows.append(log_p.exp().square().sum(1).float())
                elif isinstance(what, EntropyChanges) and what.less_expected:
                    entropy_T1 = -(log_p.exp() * log_p).sum(1, keepdim=True)
                    rows.append((log_p.exp().square() * (entropy_T1 + log_p)).sum(1).float())
        return what.columns(torch.stack(rows), batch.mask_T)

    def forward_backward(self, share: Share, loss: Loss) -> Metrics:
        weight = self._model.weight
        self.gradient = torch.zeros_like(weight)
        for indices in share.micro_batches:
            batch = share.batch.select(indices)
            predictions = self._predictions(batch, loss.temperature)
            if isinstance(loss, PolicyLoss) and loss.divergence is not None:
                tokens_TK = batch.fields["teacher_tokens"].long()
                log_p = self._rows(batch, loss.temperature).log_softmax(1).gather(1, tokens_TK)
                teacher = batch.fields["teacher_token_logprobs"]
                predictions["divergence"] = coarse_divergence(log_p, teacher, loss.divergence.direction).float()
            total, _ = loss(LossInputs(predictions, batch.mask_T, batch.lengths, batch.fields))
            (gradient,) = torch.autograd.grad(total / loss.normalizer(share.totals), weight, materialize_grads=True)
            self.gradient += gradient
        return {}

    def optim_step(self) -> StepResult:
        return StepResult(grad_norm=1.0, learning_rate=RATE, skipped=False)


class Worker(TrainerWorker):
    """One replica."""

    def __init__(self, rank: int, engine: Engine, reference: Engine | None, meeting: Meeting) -> None:
        self.rank = rank
        self.engine: Any = engine
        self._reference: Any = reference
        self.spec: Any = SimpleNamespace(offloads_reference=False, reference_is_base=False)
        self._peaks = PeakMemory()
        self._meeting = meeting

    def _gather(self, own: torch.Tensor) -> list[torch.Tensor]:
        return self._meeting.gather(self.rank, own)


class Meeting:
    """Exchanges tensors between threads."""

    def __init__(self, n: int) -> None:
        self._all = threading.Barrier(n)
        self._tensors: list[Any] = [None] * n

    def gather(self, rank: int, own: torch.Tensor) -> list[torch.Tensor]:
        self._tensors[rank] = own
        self._all.wait(60)
        tensors = list(self._tensors)
        self._all.wait(60)
        return tensors

    def abort(self) -> None:
        self._all.abort()


class Replicas:
    """Takes the place of a `WorkerGroup`."""

    def __init__(self, n: int, model: Bigrams, reference: Bigrams | None) -> None:
        self._model = model
        self._meeting = Meeting(n)
        frozen = None if reference is None else Engine(reference)
        self._workers = [Worker(rank, Engine(model), frozen, self._meeting) for rank in range(n)]

    def call_each(
        self, method: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], wanted: Sequence[int]
    ) -> list[Any]:
        results: list[Any] = [None] * len(self._workers)

        def run(rank: int) -> None:
            try:
                results[rank] = method(self._workers[rank], *arguments[rank])
            except BaseException as error:  # noqa: BLE001 - the caller raises it
                results[rank] = error
                self._meeting.abort()

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(self._workers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        failures = [result for result in results if isinstance(result, BaseException)]
        for failure in sorted(failures, key=lambda failure: isinstance(failure, threading.BrokenBarrierError)):
            raise failure
        if method is TrainerWorker.update:
            self._model.step(sum((worker.engine.gradient for worker in self._workers), torch.zeros(())))
        return [results[rank] for rank in wanted]

    keep_each = call_each


def trainer(n: int, model: Bigrams, reference: Bigrams | None = None, max_tokens: int = 20) -> Trainer:
    """Return the handle of `n` replicas of a model, with micro-batches of so many tokens."""
    planner = BatchPlanner.of(MicroBatchConfig(max_tokens_per_mb=max_tokens), parse_backend(f"megatron:d{n}"), 100.0)
    workers: Any = Replicas(n, model, reference)
    return Trainer(workers, planner)


def without_object_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the columns themselves take the place of references to them."""
    for module in (remote_batch, models, token_advantages):
        for name in ("put", "fetch"):
            monkeypatch.setattr(module, name, lambda columns: columns, raising=False)
