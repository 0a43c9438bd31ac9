"""The training engine on FSDP2 and a model of transformers.

share of this replica ─> micro-batches ─> this rank's tokens of them ─> model and head, one micro-batch at a time
      ─> whole sequences ─> loss ─> gradients, each layer's summed over all ranks and sharded in the backward pass
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fivefold.algorithms.loss import Loss
from fivefold.algorithms.metrics import Metric, Metrics
from fivefold.bridge.hf_reader import HFWeights, resolve_model_folder
from fivefold.bridge.hf_saver import Block
from fivefold.bridge.parameters import Parameter, trained_parameters
from fivefold.bridge.random_weights import RandomWeights
from fivefold.config.schema.engine import EngineConfig
from fivefold.engine.adapters import Switch
from fivefold.engine.base import (
    COMPUTING,
    EngineBase,
    Kept,
    apply_loss,
    asked_by,
    assemble_predictions,
    keep_predictions,
    whole_sequences,
)
from fivefold.engine.contract import OFFLOADABLE, EngineOptions, Offloadable
from fivefold.engine.deterministic import make_deterministic
from fivefold.engine.ema import EMAWeights
from fivefold.engine.heads import Asked, Head
from fivefold.engine.kernels.flash import flash_kernels
from fivefold.engine.metrics import load_metrics, reduce_metrics
from fivefold.engine.packing import BatchPlanner, Share
from fivefold.engine.routes import require_routes
from fivefold.engine.scores import Score
from fivefold.engine.sequences import MicroBatch, MicroBatchBuilder
from fivefold.engine.state.optimizer_state import loss_scale_of
from fivefold.engine.state.parkable import Parkable
from fivefold.engine.state.training_state import TorchGenerators, TrainingState
from fivefold.families.read import load_shape
from fivefold.families.shape import ModelShape
from fivefold.fsdp.expert_loads import ExpertLoads
from fivefold.fsdp.groups import Groups, make_groups
from fivefold.fsdp.mappings import mappings
from fivefold.fsdp.model import build_model, units
from fivefold.fsdp.optimizer import Optimizer
from fivefold.fsdp.replay import Replay
from fivefold.fsdp.shards import Shards, local_elements
from fivefold.layout.parallel import ParallelLayout
from fivefold.observe.progress import counting
from fivefold.weights.stream import Stack

if TYPE_CHECKING:
    from fivefold.fsdp.dropout import Streams


def _random_numbers(rate: float, seed: int, groups: Groups) -> tuple[Switch, Streams | None, TorchGenerators]:
    """Return the switch of adapters, the streams by which they drop inputs, None at rate 0, and all generators."""
    if rate == 0:
        return Switch(), None, TorchGenerators()
    from fivefold.fsdp.dropout import StreamGenerators, Streams  # by who chooses it

    streams = Streams()
    return streams.switch(rate, seed, groups), streams, StreamGenerators(streams)


class FSDPEngine(EngineBase[Optimizer]):
    """A model on FSDP2. With an optimizer it trains, without one it only computes predictions.

    torch.distributed must be initialised, with one process for each rank of `layout`.
    """

    def __init__(self, config: EngineConfig, layout: ParallelLayout, options: EngineOptions) -> None:
        """Build the model of `config.path`, spread over processes by `layout`.

        Raises:
            ValueError: a layout that the model cannot take, or weights that do not fit.
        """
        if config.fsdp.use_deterministic_algorithms:
            make_deterministic()
        self.config, self.layout = config, layout
        self._folder = resolve_model_folder(config.path)
        stored = load_shape(self._folder)
        self.shape, adapters, optimizer = options.shape_of(stored), options.adapters, options.optimizer
        self.groups = make_groups(layout, options.timeout_s, config.fsdp.reshard_after_forward)
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        is_cuda = torch.cuda.is_available()
        self._device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
        flash = flash_kernels(config.attn_impl, config.dtype, self._device)
        self.head = Head.of(stored.vocab, config.fsdp, self.groups.tp, is_value=options.value_head)
        known = mappings(self.shape)
        learning = trained_parameters(known.values(), options.learning)
        dropout = 0.0 if adapters is None or optimizer is None else adapters.dropout
        switch, streams, generators = _random_numbers(dropout, options.seed, self.groups)
        self.adapters = None if adapters is None else switch
        self.model = build_model(
            self._folder, config, self.shape, known, learning, self.head, self.groups, self._device, switch, streams
        )
        if self.shape.vision is not None:
            from fivefold.vision.tower import VisionTower  # by models that see images

            group = self.groups.tp if self.groups.tp.size() > 1 else self.groups.cp
            self.model.tower = VisionTower(self._folder, self._dtype, self._device, group)
        self._loads = ExpertLoads(self.model.model.layers, self.shape.n_experts, self._device)
        self._replay = Replay(self.model.model.layers, self.shape, self._device) if options.replays else None
        self.shards = Shards(self.model, self.shape, known, learning, self.groups, options.seed)
        self._load(options.seed, stored)
        self.optimizer: Optimizer | None = None
        self._state: TrainingState | None = None
        if optimizer is not None:
            scale = loss_scale_of(config.dtype)
            self.optimizer = Optimizer(
                optimizer, config.fsdp.optimizer, self.shards, self.groups, self._device, options.total_steps, scale
            )
            self._state = TrainingState(self.optimizer, self.shards.parameters, layout, generators)
        self._away: set[Offloadable] = set()
        """What is offloaded."""
        self._parkable = [Parkable(shard.values_N) for shard in self.shards]
        self._has_experts = self.shape.is_moe
        self.planner = BatchPlanner.of_model(config.mb_spec, layout, self.shape)
        self._builder = MicroBatchBuilder(
            layout=layout,
            cp_rank=self.groups.cp.rank(),
            same_length=False,
            flash=flash,
            device=self._device,
            moe_layers=None if self._replay is None else self._replay.layers,
        )

    def _load(self, seed: int, stored: ModelShape) -> None:
        """Load the weights; `stored` is the shape of the model in the files, which need not be a critic."""
        if self.config.init_from_scratch:
            self.shards.load(RandomWeights.of(stored, self._folder, seed, self._device, self._dtype))
            return
        with HFWeights(self._folder) as weights:
            self.shards.load(weights)

    @property
    def peers(self) -> dist.ProcessGroup:
        """See `TrainingEngine`."""
        return self.groups.dp

    def effective_config(self) -> dict[str, Any]:
        """Return what the model, its sharding and its mixed precision are configured as."""
        return {
            "transformers": self.model.model.config.to_dict(),
            "fsdp": {
                "param_dtype": self.config.dtype,
                "shards": self.groups.shard.size(),
                **self.config.fsdp.model_dump(),
            },
        }

    def forward_backward(self, share: Share, loss: Loss) -> Metrics:
        """Accumulate the gradient of `loss` over one mini-batch. Returns its metrics, `loss` among them.

        It is the gradient of (sum of the loss over all sequences) / `loss.normalizer(totals)`, whatever the layout,
        the split into micro-batches and the packing.
        """
        factor = self._trained("train").loss_factor
        self._require("params", "grads")
        if self._replay is not None:
            require_routes(share.batch)
            self._replay.start()
        normalizer, asked = loss.normalizer(share.totals), asked_by(loss, self.head)
        kept = []
        self._loads.start_mini_batch()
        micro_batches = self._builder.build(share)
        with self._dropping(), counting(COMPUTING, len(micro_batches)) as count:
            for micro_batch in micro_batches:
                with self._replaying(micro_batch):
                    with self._loads.counting(micro_batch.local.padding_T):
                        predictions = self._predict(micro_batch, asked)
                    total, metrics = apply_loss(loss, factor / normalizer, micro_batch, predictions)
                    total.backward()
                kept.append(metrics)
                count(1)
        counts = self.groups.tp.rank() == 0 and self.groups.cp.rank() == 0
        reduced = reduce_metrics(kept, counts=counts)
        reduced["loss"] = Metric(reduced["loss"].sum / normalizer)
        if self._has_experts:
            load_LE = self._loads.total(self.groups.shard)
            reduced |= load_metrics(load_LE, self.shape.moe_layers)
            if self._replay is not None:
                self._replay.check(with_gradient=True)
                reduced |= self._replay.metrics(float(load_LE.sum()), self.groups.shard)
        return reduced

    @torch.no_grad()
    def _score(self, share: Share, what: Score) -> torch.Tensor:
        """Return the predictions of a score without gradient, float32 [P, T], on the CPU."""
        self._require("params")
        micro_batches = self._builder.build(share)
        kept: list[Kept] = []
        if self._replay is not None:
            self._replay.start()
        with counting(COMPUTING, len(micro_batches)) as count:
            for micro_batch in micro_batches:
                with self._replaying(micro_batch):
                    kept.append(keep_predictions(micro_batch, self._predict(micro_batch, what))[1])
                count(1)
        if self._replay is not None and not what.records_routes:
            self._replay.start()
        # Without a backward pass, the root unit would stay gathered, and later passes would use its old weights.
        for unit in units(self.model):
            if self.groups.shares is not None:
                # What a layer keeps in shares is freed only where it is gathered again.
                unit.unshard()
            unit.reshard()
        return assemble_predictions(kept, what.n_rows, share.batch.n_tokens, self._device).cpu()

    def _recorded(self, share: Share) -> torch.Tensor:
        assert self._replay is not None, "this engine records no routes"
        self._replay.check(with_gradient=False)
        return self._replay.recorded(share.batch.n_tokens, self.groups.cp)

    def _replaying(self, micro_batch: MicroBatch) -> AbstractContextManager[None]:
        return nullcontext() if self._replay is None else self._replay.working(micro_batch.local.routes)

    def _predict(self, micro_batch: MicroBatch, asked: Asked) -> dict[str, torch.Tensor]:
        """Return the head's predictions for the micro-batch's sequences, float32 [T] each; 0 on tokens not trained."""
        return whole_sequences(micro_batch, self.model(micro_batch, asked), self.groups.cp)

    def export_stacks(self, readers: frozenset[int] | None = None) -> Iterator[Stack]:
        """Yield every whole weight; see `TrainingEngine.export_stacks`."""
        self._require("params")
        return self.shards.export(self._dtype, readers)

    def export_adapters(self, readers: frozenset[int] | None = None) -> Iterator[Stack]:
        """Yield every whole matrix of the adapters; see `TrainingEngine.export_adapters`."""
        self._require("params")
        return self.shards.export_adapters(self._dtype, readers)

    def ema_weights(self, decay: float) -> EMAWeights:
        """Return this model's weights as an EMA, with this decay, of a model that they follow."""
        return EMAWeights(self.shards.parameters, decay)

    def held_weights(self) -> dict[str, torch.Tensor]:
        """Return the elements of each weight that this rank holds, flat, by the weight's name."""
        return {parameter.name: parameter.values_N for parameter in self.shards.parameters}

    def _blocks(self) -> Iterator[Block]:
        return self.shards.blocks(self._dtype)

    def held_adapters(self) -> list[Parameter]:
        """Return the parameters of adapters; see `TrainingEngine.held_adapters`."""
        return [parameter for parameter in self.shards.parameters if parameter.mapping.is_adapter]

    def _adapter_blocks(self) -> Iterator[Block]:
        return self.shards.adapter_blocks(self._dtype)

    def offload(self, what: Collection[Offloadable] = OFFLOADABLE) -> int:
        """Give the device memory of parameters, gradients or optimizer state back, as `what` names.

        Parameters, which are the master weights too, and moments are copied to pinned host memory, gradients are lost.
        Call `onload` before the next method that needs what was moved.

        Returns:
            The bytes that were freed on this rank's device.
        """
        freed = 0
        if "params" in what:
            freed += sum(tensor.park(keep_values=True) for tensor in self._parkable)
        if self.optimizer is not None and "grads" in what:
            freed += self._gradient_bytes()
            self.optimizer.zero_grad()
        if self.optimizer is not None and "optimizer" in what:
            freed += self.optimizer.state.park()
        self._away |= set(what)
        torch.cuda.empty_cache()
        return freed

    def onload(self, what: Collection[Offloadable] = OFFLOADABLE) -> int:
        """Bring back what `offload` moved; gradients are zero then, and take no memory until they are computed.

        Returns:
            The bytes that were allocated on this rank's device.
        """
        allocated = 0
        if "params" in what:
            allocated += sum(tensor.fetch(keep_values=True) for tensor in self._parkable)
        if self.optimizer is not None and "optimizer" in what:
            allocated += self.optimizer.state.fetch()
        self._away -= set(what)
        return allocated

    def _gradient_bytes(self) -> int:
        """Return the bytes of the accumulated gradients."""
        grads = [shard.tensor.grad for shard in self.shards]
        return sum(local_elements(grad).nbytes for grad in grads if grad is not None)
