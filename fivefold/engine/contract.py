"""The contract of training engines, whatever library the model runs on.

All processes of a model call each method together, each with the share of its data-parallel replica. Results are
global and the same on every rank, except that a score returns the columns of the replica's own share.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
import torch.distributed as dist

from fivefold.algorithms.loss import Loss
from fivefold.algorithms.metrics import Metrics
from fivefold.config.schema.engine import OptimizerConfig
from fivefold.config.schema.machines import SchedulerConfig
from fivefold.engine.packing import BatchPlanner, Share
from fivefold.engine.scores import Score
from fivefold.families.adapters import AdapterShape
from fivefold.families.shape import ModelShape
from fivefold.families.tensors import ADAPTERS, ALL, NONE, Trained
from fivefold.weights.stream import Stack

if TYPE_CHECKING:
    from fivefold.bridge.parameters import Parameter
    from fivefold.engine.ema import EMAWeights
    from fivefold.engine.state.dcp_files import WrittenPart

Offloadable = Literal["params", "grads", "optimizer"]
OFFLOADABLE: tuple[Offloadable, ...] = ("params", "grads", "optimizer")
PARAMS: tuple[Offloadable, ...] = ("params",)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What an engine is built with besides its section of the recipe and its layout."""

    seed: int
    """Seed of dropout, of random weights (`init_from_scratch`) and of new adapters."""
    optimizer: OptimizerConfig | None = None
    """Hyper-parameters; None for a model that is not trained."""
    total_steps: int = 1
    """Optimizer steps of the whole run, for the learning-rate schedule."""
    timeout_s: float = SchedulerConfig.model_fields["timeout_s"].default
    """Longest time, in seconds, that a collective may wait for another rank."""
    value_head: bool = False
    """Whether the model has a value head in place of its output layer."""
    value_bias: bool = True
    """Whether that head has a bias: a critic's has, a reward model's has not."""
    trained: Trained = ALL
    """The tensors that the optimizer changes; the others stay as they are, in the config's dtype."""
    replays: bool = False
    """Whether routers send tokens to the experts in a batch's field `routes`; without the field, their choices are
    recorded."""
    adapters: AdapterShape | None = None
    """Low-rank adapters, which are trained in place of the model's weights; None: it has none."""

    @property
    def learning(self) -> Trained:
        """The tensors that are trained."""
        if self.optimizer is None:
            return NONE
        return self.trained if self.adapters is None else ADAPTERS

    def shape_of(self, stored: ModelShape) -> ModelShape:
        """Return the shape of the model whose files have the shape `stored`."""
        shape = stored.as_critic(has_bias=self.value_bias) if self.value_head else stored
        return replace(shape, adapters=self.adapters)


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step."""

    grad_norm: float
    """Global L2 norm of the gradient before clipping."""
    learning_rate: float
    """Learning rate of this step."""
    skipped: bool
    """Whether no weight was changed, because the gradient was not finite."""
    loss_scale: float | None = None
    """Factor of a float16 model's loss, by which the gradient was divided again; None: the loss has none."""
    non_finite: tuple[str, ...] = ()
    """The first few parameters whose gradient is not finite, if the step was skipped. Empty for a skipped step: all
    gradients are finite, but their norm exceeds float32."""

    @property
    def was_scaled(self) -> bool:
        """Whether the loss had a factor above 1: after an overflow, the next step has a smaller one."""
        return self.loss_scale is not None and self.loss_scale > 1.0


class Snapshot(Protocol):
    """One rank's part of the training state at one moment, in host memory or on the disk."""

    def write(self) -> WrittenPart:
        """Write this rank's files, unless they are on the disk, and wait until they are.

        It may run in any thread, in parallel with whatever the rank does, and may be called again after an error.

        Raises:
            OSError: a file cannot be written; the error names it.
        """


class TrainingEngine(Protocol):
    """A model that is spread over processes; it trains if it was built with an optimizer."""

    planner: BatchPlanner
    """Splits mini-batches over replicas and micro-batches, as this engine needs it."""

    @property
    def peers(self) -> dist.ProcessGroup:
        """Ranks of the same place in each data-parallel replica, in the order of the replicas."""

    def effective_config(self) -> dict[str, Any]:
        """Return the whole configuration of the library that the model runs on, as YAML can hold it."""

    def forward_backward(self, share: Share, loss: Loss) -> Metrics:
        """Accumulate the gradient of `loss` over one mini-batch. Returns its metrics, `loss` among them.

        It is the gradient of (sum of the loss over all sequences) / `loss.normalizer(totals)`, whatever the layout, the
        split into micro-batches and the packing.
        """

    def optim_step(self) -> StepResult:
        """Clip the accumulated gradient, update the weights, advance the schedule and clear the gradient."""

    def score(self, share: Share, what: Score) -> dict[str, torch.Tensor]:
        """Compute a score of the share's trained tokens in a forward pass without gradient.

        Returns:
            Columns [T, ...] of the share's own sequences, by name, on the CPU; `what` defines what they hold.

        Raises:
            ValueError: the model's head does not predict what the score needs.
        """

    def export_weights(self, readers: frozenset[int] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every whole weight under its Hugging Face name; all ranks must iterate to the end, in lock-step.

        Args:
            readers: the ranks that need the weights; None: all. The others get tensors without content, on `meta`.
        """

    def export_stacks(self, readers: frozenset[int] | None = None) -> Iterator[Stack]:
        """Do what `export_weights` does, with the experts of a layer in a few stacks.

        On Megatron-Core, the weights of a model that is trained in part may be offloaded: the trained ones come back to
        the device, and the others pass through it.
        """

    def export_adapters(self, readers: frozenset[int] | None = None) -> Iterator[Stack]:
        """Yield every whole matrix of the adapters likewise; the engine must have been built with some."""

    def held_adapters(self) -> Sequence[Parameter]:
        """Return the parameters of adapters, as far as this rank holds them; changing them changes the model."""

    def without_adapters(self) -> AbstractContextManager[None]:
        """Compute the model without its adapters inside the block; the engine must have been built with some."""

    def save_adapters(self, folder: Path) -> None:
        """Write the adapters as a folder that PEFT loads, from all ranks, which must all see it.

        Raises:
            OSError: as `save_hf`.
        """

    def save_hf(self, folder: str | Path, tokenizer_source: str | Path | None = None) -> None:
        """Write the model as a Hugging Face folder that transformers loads, from all ranks, which must all see it.

        The files are the same for every layout. An earlier folder is replaced when the new one is whole.

        Raises:
            OSError: on every rank, if a disk is full or one of them cannot write; an earlier folder stays as it was.
        """

    def snapshot(self, folder: Path, *, copy: bool = True) -> Snapshot:
        """Copy this rank's part of the training state to host memory, to be written to `folder`.

        Training may continue when this returns. The folder is whole when all ranks have written their part, and
        `dcp_files.finish` has written the index.

        Args:
            folder: the folder of the state.
            copy: False: write the files at once, through little host memory, instead of copying the state.

        Raises:
            ValueError: the last copy still exists and is not written yet, or the engine has no optimizer.
            OSError: without a copy, a file cannot be written; the error names it.
        """

    def load(self, folder: Path) -> None:
        """Load the training state in `folder`, of this layout or any other; accumulated gradients are lost.

        Raises:
            ValueError: the folder holds no complete training state, or another model's; or the engine has no optimizer.
        """

    def offload(self, what: Collection[Offloadable] = OFFLOADABLE) -> int:
        """Free the device memory of parameters, gradients or optimizer state, as `what` names.

        Parameters and optimizer state are copied to pinned host memory, gradients are lost. Call `onload` before the
        next method that needs what was moved.

        Returns:
            The bytes freed on this rank's device.
        """

    def onload(self, what: Collection[Offloadable] = OFFLOADABLE) -> int:
        """Bring back what `offload` moved; gradients are zero then.

        Returns:
            The bytes allocated on this rank's device.
        """

    def held_weights(self) -> dict[str, torch.Tensor]:
        """Return the elements of each weight that this rank holds, flat, by the weight's name.

        The names and the elements are the same for every model of one shape on one layout of the same engine.
        """

    def ema_weights(self, decay: float) -> EMAWeights:
        """Return this model's weights as an EMA, with this decay, of a model that they follow."""
