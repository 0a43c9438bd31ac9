"""The training engine on Megatron-Core, for a model that is spread over processes.

share of this replica ─> micro-batches ─> this rank's tokens of them ─> Megatron's schedule over chunks
      ─> predictions from the last hidden state ─> whole sequences again ─> loss ─> gradients, summed over all ranks
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from fivefold.algorithms.loss import Loss
from fivefold.algorithms.metrics import Metric, Metrics
from fivefold.config.schema.engine import EngineConfig
from fivefold.engine.base import (
    COMPUTING,
    LossStep,
    apply_loss,
    asked_by,
    assemble_predictions,
    keep_predictions,
    whole_sequences,
)
from fivefold.engine.contract import EngineOptions, StepResult
from fivefold.engine.heads import Asked, Head
from fivefold.engine.kernels.elementwise import cos_sin
from fivefold.engine.kernels.flash import flash_kernels
from fivefold.engine.metrics import auxiliary_losses, load_metrics, reduce_metrics
from fivefold.engine.packing import BatchPlanner, Share
from fivefold.engine.rope import inverse_frequencies, local_frequencies
from fivefold.engine.routes import require_routes
from fivefold.engine.scores import Score
from fivefold.engine.sequences import LocalSequences, MicroBatch, MicroBatchBuilder
from fivefold.families.vision import VisionShape
from fivefold.layout.parallel import ParallelLayout, with_stages
from fivefold.mcore.buffers import ChunkBuffers
from fivefold.mcore.build import build
from fivefold.mcore.held import HeldModel
from fivefold.mcore.layers import PackedSequences
from fivefold.mcore.model import Decoder
from fivefold.mcore.replay import Replay
from fivefold.mcore.router import LOSSES, expert_loads, forget_micro_batches, routers_of, start_mini_batch
from fivefold.mcore.stage_timers import BUBBLE, StageTimers
from fivefold.observe.progress import counting
from fivefold.weights.stream import Stack


class MegatronEngine(HeldModel):
    """A model on Megatron-Core. With an optimizer it trains, without one it only computes predictions.

    torch.distributed must be initialised, with one process for each rank of `layout`.
    """

    def __init__(self, config: EngineConfig, layout: ParallelLayout, options: EngineOptions) -> None:
        """Build the model of `config.path`, spread over processes by `layout`.

        Raises:
            ValueError: a layout or an option that the model or Megatron-Core cannot take, or weights that do not fit.
        """
        layout = with_stages(layout, config.megatron)
        built = build(config, layout, options)
        self.config, self.layout, self._folder, self.shape = config, layout, built.folder, built.shape
        self.groups, self._shards = built.groups, built.shards
        self._megatron_config, self._effective = built.megatron, built.effective
        self._group_size: int = built.megatron.microbatch_group_size_per_vp_stage
        self._bridge, self._decoders, self._chunks = built.bridge, built.decoders, built.chunks
        self._routers = routers_of(built.decoders)
        self._replay = Replay(self._routers, self.shape) if options.replays else None
        self.parameters, self.optimizer, self._state = built.parameters, built.optimizer, built.state
        self.adapters, self._roundings = built.adapters, built.roundings
        self._buffers = ChunkBuffers(built.chunks, built.parameters)
        self._load_LE = None
        self._exports: dict[frozenset[int] | None, Iterable[Stack]] = {}
        """What has been exported to which readers."""
        self._away = set()
        self._device = torch.device(torch.cuda.current_device())
        self._frequencies = inverse_frequencies(self.shape, self._device)
        self._local_frequencies = local_frequencies(self.shape, self._device)
        self._rope_axes: torch.Tensor | None = None
        """By which position of a token each channel pair turns; None: a token has one."""
        if self.shape.vision is not None:
            self._rope_axes = self._see(self.shape.vision)
        self._has_experts = self.shape.is_moe
        self.planner = BatchPlanner.of_model(config.mb_spec, layout, self.shape)
        self.head = Head.of(built.stored.vocab, config.megatron, self.groups.tp, is_value=options.value_head)
        self._builder = MicroBatchBuilder(
            layout=layout,
            cp_rank=self.groups.cp.rank(),
            same_length=config.megatron.token_dispatcher == "allgather" or layout.gathers_replicas,
            flash=flash_kernels(config.attn_impl, config.dtype, self._device),
            device=self._device,
            moe_layers=None if self._replay is None else self._replay.layers,
        )

    def _see(self, vision: VisionShape) -> torch.Tensor:
        """Let the model see images; return by which position of a token each channel pair turns."""
        from fivefold.mcore.vision import install_vision  # by models that see images
        from fivefold.vision.positions import rope_axes
        from fivefold.vision.tower import VisionTower

        tower = VisionTower(self._folder, getattr(torch, self.config.dtype), self._device, self.groups.tp_cp)
        install_vision(self._decoders, vision, tower)
        return rope_axes(self.shape).to(self._device)

    @property
    def peers(self) -> dist.ProcessGroup:
        """See `TrainingEngine`."""
        return self.groups.dp

    def effective_config(self) -> dict[str, Any]:
        """Return the values of all fields of Megatron-Core's configuration, by class."""
        return self._effective

    def forward_backward(self, share: Share, loss: Loss) -> Metrics:
        """Accumulate the gradient of `loss` over one mini-batch. Returns its metrics, `loss` among them.

        It is the gradient of (sum of the loss over all sequences) / `loss.normalizer(totals)`, whatever the layout,
        the split into micro-batches and the packing. Only two of the router's auxiliary losses depend on the split,
        because their formulas are over one micro-batch.
        """
        optimizer = self._trained("train")
        self._require("params", "grads")
        if self._replay is not None:
            require_routes(share.batch)
        for chunk in self._chunks:
            chunk.train()
        totals = share.totals
        # Megatron scales auxiliary losses, which are sums over tokens, and the loss by one factor. It makes the former
        # a mean, and `step` divides the loss by it.
        scale, factor = 1.0 / max(1, totals.n_tokens), optimizer.loss_factor
        self._megatron_config.grad_scale_func = lambda value: value * (scale * factor)
        step = partial(apply_loss, loss, 1.0 / (loss.normalizer(totals) * scale))
        start_mini_batch(self._routers)
        timers = StageTimers() if self.layout.pp > 1 else None
        earlier = self._buffers.set_gradients_aside() if self._buffers.has_gradients else None
        if earlier is None:
            for rounding in self._roundings:
                rounding.start(optimizer.steps)
        with self._dropping():
            kept = self._run(share, step, asked_by(loss, self.head), backward=True, timers=timers)
        if earlier is not None:
            self._buffers.add_gradients(earlier)
        self._buffers.has_gradients = True
        counts = self.groups.tp.rank() == 0 and self.groups.cp.rank() == 0
        metrics = reduce_metrics(kept, counts=counts)
        metrics["loss"] = Metric(metrics["loss"].sum / loss.normalizer(totals))
        if timers is not None:
            metrics[BUBBLE] = Metric(timers.bubble(self.groups.pp))
        if self._has_experts:
            load_LE, losses_LK = expert_loads(self._routers, self.shape.n_layers, self.shape.n_experts)
            metrics |= load_metrics(load_LE, self.shape.moe_layers)
            metrics |= auxiliary_losses(LOSSES, losses_LK, load_LE, self.shape)
            if self._replay is not None:
                self._replay.check(with_gradient=True)
                metrics |= self._replay.metrics(float(load_LE.sum()))
            self._load_LE = load_LE if self._load_LE is None else self._load_LE + load_LE
        return metrics

    def optim_step(self) -> StepResult:
        """Make an optimizer step; see `EngineBase.optim_step`."""
        self._buffers.has_gradients = False
        result = super().optim_step()
        if self._load_LE is not None and self.shape.router_bias and not result.skipped:
            moving = {parameter.tensor for parameter in self.parameters.offsets}
            for router in self._routers:
                if router.expert_bias in moving:
                    router.balance(self._load_LE[router.layer_number - 1])
        self._load_LE = None
        return result

    @torch.no_grad()
    def _score(self, share: Share, what: Score) -> torch.Tensor:
        """Return the predictions of a score without gradient, float32 [P, T], on the CPU."""
        self._require("params")
        for chunk in self._chunks:
            chunk.eval()
        kept = self._run(share, keep_predictions, what, backward=False)
        if not what.records_routes:
            forget_micro_batches(self._routers)
        total_PT = assemble_predictions(kept, what.n_rows, share.batch.n_tokens, self._device)
        dist.all_reduce(total_PT, group=self.groups.pp)  # zero on all stages but the last
        return total_PT.cpu()

    def _recorded(self, share: Share) -> torch.Tensor:
        assert self._replay is not None, "this engine records no routes"
        self._replay.check(with_gradient=False)
        is_parallel = self._megatron_config.sequence_parallel
        return self._replay.recorded(share.batch.n_tokens, self.groups, sequence_parallel=is_parallel)

    def export_stacks(self, readers: frozenset[int] | None = None) -> Iterator[Stack]:
        """Yield every whole weight; see `TrainingEngine.export_stacks`."""
        if not (self._buffers.has_frozen and self._bridge.reads_parts):
            self._require("params")
        if readers not in self._exports:
            self._exports[readers] = self._bridge.export(
                self.parameters.tensors, self._shards, readers=readers, rows=self._buffers.rows
            )
        return self._from_host(self._exports[readers]) if "params" in self._away else iter(self._exports[readers])

    def _run(
        self,
        share: Share,
        step: LossStep,
        asked: Asked,
        *,
        backward: bool,
        timers: StageTimers | None = None,
    ) -> list[Any]:
        """Run Megatron's schedule over the share. Returns what `step` kept of each micro-batch, on the last stage."""
        micro_batches = self._builder.build(share)
        steps = [(micro_batch, self._packed(micro_batch.local)) for micro_batch in micro_batches]
        # There may be fewer micro-batches than the recipe puts through a virtual stage in one go.
        self._megatron_config.microbatch_group_size_per_vp_stage = min(self._group_size, len(micro_batches))

        def predict_and_lose(
            micro_batch: MicroBatch, decoder: Decoder, hidden: torch.Tensor
        ) -> tuple[Any, torch.Tensor, Any]:
            loss, kept = step(micro_batch, self._predict(micro_batch, decoder, hidden, asked))
            return loss, torch.zeros((), dtype=torch.int), kept

        def forward(
            iterator: Iterator[tuple[MicroBatch, PackedSequences]], chunk: Any
        ) -> tuple[torch.Tensor, Callable[..., Any]]:
            micro_batch, packed = next(iterator)
            count(1)
            decoder = chunk.module if isinstance(chunk, DistributedDataParallel) else chunk
            return chunk(micro_batch.local, packed), partial(predict_and_lose, micro_batch, decoder)

        functions = self._training_functions(timers) if backward else nullcontext()
        with functions, counting(COMPUTING, len(steps) * len(self._chunks)) as count:
            kept: list[Any] = get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=[iter(steps) for _ in self._chunks],
                model=self._chunks,
                num_microbatches=len(micro_batches),
                # Where all lengths are the same, Megatron-Core divides it by the ranks that share a sequence.
                seq_length=max(micro_batch.padded for micro_batch in micro_batches),
                micro_batch_size=1,
                forward_only=not backward,
            )
        return kept

    def _packed(self, local: LocalSequences) -> PackedSequences:
        dtype = getattr(torch, self.config.dtype)
        positions = local.positions_T
        if local.images is not None and self._rope_axes is not None:
            positions = local.images.turning(self._rope_axes)
        cos_T1D, sin_T1D = cos_sin(positions, self._frequencies, dtype, self.shape.rope_scaling)
        own = self._local_frequencies
        return PackedSequences(
            qkv_format="thd",
            attention=local.attention,
            cos_T1D=cos_T1D,
            sin_T1D=sin_T1D,
            local=None if own is None else cos_sin(local.positions_T, own, dtype, None),
        )

    def _predict(
        self, micro_batch: MicroBatch, decoder: Decoder, hidden: torch.Tensor, asked: Asked
    ) -> dict[str, torch.Tensor]:
        """Return the head's predictions for the micro-batch's sequences, float32 [T] each; 0 on tokens not trained."""
        hidden = hidden.squeeze(1)
        if self._megatron_config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        local = micro_batch.local
        own = asked.predict(self.head, hidden[local.rows_N], decoder.output(), micro_batch)
        return whole_sequences(micro_batch, own, self.groups.cp)

    @contextmanager
    def _training_functions(self, timers: StageTimers | None) -> Iterator[None]:
        """Inside the block, Megatron's schedules have the functions that delay and finish the gradients' reduction.

        They do not stay: through them, the configuration refers to the engine by way of C++ objects, which Python's
        garbage collector cannot follow, so no engine would ever be freed. `timers` are the schedule's.
        """
        config, no_sync = self._megatron_config, [chunk.no_sync for chunk in self._chunks]
        config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        config.finalize_model_grads_func, config.timers = self._finalize_gradients, timers
        try:
            yield
        finally:
            config.no_sync_func = config.finalize_model_grads_func = config.timers = None

    def _finalize_gradients(self, chunks: list[Any], num_tokens: torch.Tensor | None, **options: Any) -> None:
        """Run Megatron's reductions, without its division by the token count: the loss is normalised already."""
        finalize_model_grads(chunks, None, **options)
