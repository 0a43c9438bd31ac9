"""Functions for the worker processes: they train engines on a layout, and return results under Hugging Face names."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from hf_reference import Step, Tensors
from megatron.core import parallel_state
from open_engine import EngineCase, WholeBatches
from worker_pool import rejoin

from fivefold.algorithms.loss import Loss
from fivefold.batch import Batch
from fivefold.config.schema.engine import EngineConfig, OptimizerConfig
from fivefold.config.schema.megatron import MegatronConfig
from fivefold.engine.contract import EngineOptions
from fivefold.layout.parallel import ParallelLayout
from fivefold.layout.parser import parse_backend
from fivefold.mcore.engine import MegatronEngine
from fivefold.mcore.stage_timers import BUBBLE
from fivefold.weights.stream import unstacked

Module = TypeVar("Module", bound=torch.nn.Module)

_layout: ParallelLayout | None = None
"""Layout of Megatron-Core's groups in this process."""


def lay_out(text: str) -> ParallelLayout:
    """Remove Megatron-Core's groups from this process if they are of another layout than `text`."""
    global _layout
    layout = parse_backend(text)
    if layout != _layout:
        parallel_state.destroy_model_parallel()
        gc.collect()  # engines of earlier tests, whose groups would keep their threads
        rejoin()
        _layout = layout
    return layout


class OpenEngine(WholeBatches, MegatronEngine):
    """An engine that shows its gradients and modules.

    It leaves the whole gradient on every rank, though the distributed optimizer needs only the rank's part.
    """

    def _finalize_gradients(self, chunks: list[Any], num_tokens: torch.Tensor | None, **options: Any) -> None:
        super()._finalize_gradients(chunks, num_tokens, **{**options, "force_all_reduce": True})

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the accumulated gradient under Hugging Face names."""
        # Offsets of routers have no gradient, and the bridge exports whole models only.
        main_grads = {name: getattr(weight, "main_grad", weight) for name, weight in self.parameters.tensors.items()}
        exported = unstacked(self._bridge.export(main_grads, self._shards))
        return ((name, tensor) for name, tensor in exported if not name.endswith("e_score_correction_bias"))

    def spoil_gradient(self) -> None:
        """Make a gradient that is not finite."""
        vars(self.parameters.with_gradient[0].tensor)["main_grad"].fill_(torch.nan)

    def modules_of(self, kind: type[Module]) -> list[Module]:
        """Return this rank's modules of a class."""
        return [module for decoder in self._decoders for module in decoder.modules() if isinstance(module, kind)]


@dataclass(frozen=True)
class Case(EngineCase[OpenEngine]):
    """A layout of Megatron-Core, and its options."""

    megatron: MegatronConfig = field(default_factory=MegatronConfig)

    def _build(self, config: dict[str, Any], options: EngineOptions) -> OpenEngine:
        return OpenEngine(EngineConfig(**config, megatron=self.megatron), lay_out(self.layout), options)


def whole(weights: Iterator[tuple[str, torch.Tensor]]) -> Tensors:
    """Return copies of exported tensors on rank 0, and none elsewhere: they are the same on every rank."""
    copies = {name: tensor.clone() for name, tensor in weights}
    return copies if torch.distributed.get_rank() == 0 else {}


@dataclass(frozen=True)
class Gradients:
    logprobs_T: torch.Tensor
    entropy_T: torch.Tensor
    loss: float
    gradients: Tensors
    metrics: dict[str, float]


def gradients(case: Case, folder: Path, batch: Batch, loss: Loss) -> Gradients:
    """Compute predictions, loss and gradient of one batch."""
    engine = case.engine(folder, OptimizerConfig())
    logprobs, entropy = engine.logprobs_of(batch, temperature=loss.temperature)
    metrics = engine.forward_backward_of(batch, loss)
    return Gradients(logprobs, entropy, metrics["loss"], whole(engine.gradients()), metrics)


@dataclass(frozen=True)
class Run:
    steps: list[Step]
    metrics: list[dict[str, float]]
    weights: Tensors


def train(case: Case, folder: Path, batch: Batch, loss: Loss, optimizer: OptimizerConfig, n_steps: int) -> Run:
    """Make optimizer steps on one batch."""
    engine = case.engine(folder, optimizer)
    steps, metrics = [], []
    for _ in range(n_steps):
        metrics.append(engine.forward_backward_of(batch, loss))
        metrics[-1].pop(BUBBLE, None)  # by the clock
        result = engine.optim_step()
        assert not result.skipped
        steps.append(Step(metrics[-1]["loss"], result.grad_norm))
    return Run(steps, metrics, whole(engine.export_weights()))


def train_and_save(
    case: Case, folder: Path, batch: Batch, loss: Loss, optimizer: OptimizerConfig, saved: Path
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make one optimizer step and save the model to `saved`. Returns the saved model's log-probs and entropies."""
    engine = case.engine(folder, optimizer)
    engine.forward_backward_of(batch, loss)
    engine.optim_step()
    engine.save_hf(saved)
    return engine.logprobs_of(batch, temperature=1.0)
