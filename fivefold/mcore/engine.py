"""The training engine on Megatron-Core, for a model that is spread over processes.

share of this replica ─> micro-batches ─> this rank's tokens of them ─> Megatron's schedule over chunks
      ─> predictions from the last hidden state ─> whole sequences again ─> loss ─> gradients, summed over all ranks
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from fivefold.algorithms.loss import Loss
from fivefold.algorithms.metrics import Metric, Metrics
from fivefold.bridge.hf_reader import resolve_model_folder
from fivefold.bridge.hf_saver import Block, shared_blocks
from fivefold.config.schema.engine import EngineConfig, OptimizerConfig
from fivefold.config.schema.machines import SchedulerConfig
from fivefold.engine.base import (
    COMPUTING,
    EngineBase,
    LossStep,
    apply_loss,
    asked_by,
    assemble_predictions,
    keep_predictions,
    whole_sequences,
)
from fivefold.engine.contract import OFFLOADABLE, Offloadable
from fivefold.engine.deterministic import make_deterministic
from fivefold.engine.ema import EMAWeights, HeldWeight
from fivefold.engine.heads import Asked, Head, Score
from fivefold.engine.kernels.elementwise import cos_sin
from fivefold.engine.kernels.flash import flash_kernels
from fivefold.engine.metrics import auxiliary_losses, load_metrics, reduce_metrics
from fivefold.engine.packing import BatchPlanner, Share
from fivefold.engine.rope import inverse_frequencies
from fivefold.engine.sequences import LocalSequences, MicroBatch, MicroBatchBuilder
from fivefold.engine.state.optimizer_state import FixedSlice, StateFormat
from fivefold.engine.state.training_state import TrainingState
from fivefold.families.read import load_shape
from fivefold.layout.grid import rank_grid
from fivefold.layout.parallel import ParallelLayout, with_stages
from fivefold.mcore import compat, settings
from fivefold.mcore.attention import PackedSequences
from fivefold.mcore.bridges import build_bridge
from fivefold.mcore.buffers import ChunkBuffers, free_weights
from fivefold.mcore.dispatcher import check_deepep
from fivefold.mcore.generators import MegatronGenerators
from fivefold.mcore.model import Decoder, build_chunks, named_offsets, named_parameters
from fivefold.mcore.optimizer import Optimizer
from fivefold.mcore.parallel import initialize_parallel, shard_groups
from fivefold.mcore.router import LOSSES, expert_loads, routers_of, start_mini_batch
from fivefold.mcore.specs import check_transformer_engine, spec_provider
from fivefold.mcore.stage_timers import BUBBLE, StageTimers
from fivefold.mcore.weight_source import WeightSource
from fivefold.observe.progress import counting
from fivefold.types import StepResult
from fivefold.weights.stream import Stack


class MegatronEngine(EngineBase[Optimizer]):
    """A model on Megatron-Core. With an optimizer it trains, without one it only computes predictions.

    torch.distributed must be initialised, with one process for each rank of `layout`.
    """

    def __init__(
        self,
        config: EngineConfig,
        layout: ParallelLayout,
        *,
        seed: int,
        optimizer: OptimizerConfig | None = None,
        total_steps: int = 1,
        timeout_s: float = SchedulerConfig.model_fields["timeout_s"].default,
        value_head: bool = False,
        value_bias: bool = True,
    ) -> None:
        """Build the model of `config.path`.

        Args:
            config: the model and its options.
            layout: how the model is spread over processes.
            seed: seed of dropout, and of random weights (`init_from_scratch`).
            optimizer: hyper-parameters; None for a model that is not trained.
            total_steps: optimizer steps of the whole run, for the learning-rate schedule.
            timeout_s: longest time, in seconds, that a collective may wait for another rank.
            value_head: whether the model has a value head in place of its output layer.
            value_bias: whether that head has a bias: a critic's has, a reward model's has not.

        Raises:
            ValueError: a layout or an option that the model or Megatron-Core cannot take, or weights that do not fit.
        """
        compat.prepare()
        if config.megatron.use_deterministic_algorithms:
            make_deterministic()
        layout = with_stages(layout, config.megatron)
        self.config, self.layout = config, layout
        self._folder = resolve_model_folder(config.path)
        shape = load_shape(self._folder)
        self.shape = shape
        if value_head:
            self.shape = shape.as_critic() if value_bias else shape.as_reward_model()
        check_deepep(config.megatron)
        check_transformer_engine(config.megatron.kernels)
        self.groups = initialize_parallel(layout, seed, timeout_s)
        self._shards = shard_groups(self.groups)
        self._device = torch.device(torch.cuda.current_device())
        flash = flash_kernels(config.attn_impl, config.dtype, self._device)
        self._megatron_config = settings.transformer_config(config, layout, self.shape)
        self._group_size: int = self._megatron_config.microbatch_group_size_per_vp_stage
        self._bridge = build_bridge(config, self.shape, self._folder, self._megatron_config)
        self._decoders = build_chunks(self._megatron_config, layout, self.shape, spec_provider(config.megatron.kernels))
        self._routers = routers_of(self._decoders)
        self._chunks: list[Any] = list(self._decoders)
        self.parameters = dict(named_parameters(self._decoders))
        offsets = dict(named_offsets(self._decoders))
        if optimizer is not None:
            ddp = settings.ddp_config(config.megatron, layout)
            free_weights(self.parameters.values())
            self._chunks = [
                DistributedDataParallel(self._megatron_config, ddp, chunk, disable_bucketing=index > 0)
                for index, chunk in enumerate(self._decoders)
            ]
        self.weights: dict[str, torch.Tensor] = {**self.parameters, **offsets}
        """Everything that the model's files hold of this rank: parameters, and offsets of routers."""
        source = WeightSource(config, self._folder, shape)
        source.load(self._bridge, self.weights, self._shards, seed, self._device)
        self._load_LE: torch.Tensor | None = None
        """Tokens that each expert has got since the last update; None: no mini-batch was computed."""
        self._effective = {"TransformerConfig": settings.effective_values(self._megatron_config)}
        self.optimizer: Optimizer | None = None
        self._state: TrainingState | None = None
        if optimizer is not None:
            megatron_optimizer = settings.optimizer_config(config, optimizer)
            self._effective |= {
                "DistributedDataParallelConfig": settings.effective_values(ddp),
                "OptimizerConfig": settings.effective_values(megatron_optimizer),
            }
            form = StateFormat.of(config.megatron.optimizer, getattr(torch, config.dtype))
            position = rank_grid(layout)[dist.get_rank()]
            fixed = [
                FixedSlice(name, offset_E, is_stored=position.dp == position.cp == 0)
                for name, offset_E in offsets.items()
            ]
            self.optimizer = Optimizer(
                optimizer, megatron_optimizer, form, self._chunks, self.parameters, total_steps, fixed
            )
            mappings = {mapping.parameter: mapping for mapping, _ in self._bridge.mapped(self.weights)}
            source.refine(self.optimizer, mappings, self.shape, self._shards)
            self._state = TrainingState(
                self.optimizer, mappings, self._bridge.expected_names(), self._shards, layout, MegatronGenerators()
            )
        self._away: set[Offloadable] = set()
        """What is offloaded."""
        self._buffers = ChunkBuffers(self._chunks, self.parameters.values())
        self._frequencies = inverse_frequencies(self.shape, self._device)
        self.planner = BatchPlanner.of(config, layout, self.shape)
        self.head = Head.of(shape.vocab, config.megatron, self.groups.tp, is_value=value_head)
        self._builder = MicroBatchBuilder(
            layout=layout,
            cp_rank=self.groups.cp.rank(),
            same_length=config.megatron.token_dispatcher == "allgather" or layout.gathers_replicas,
            flash=flash,
            device=self._device,
        )

    def effective_config(self) -> dict[str, Any]:
        """Return the values of all fields of Megatron-Core's configuration, by class."""
        return self._effective

    def forward_backward(self, share: Share, loss: Loss) -> Metrics:
        """Accumulate the gradient of `loss` over one mini-batch. Returns its metrics, `loss` among them.

        The gradient is that of (sum of the loss over all sequences) / `loss.normalizer(totals)`, whatever the layout,
        the split into micro-batches and the packing. Only two of the router's auxiliary losses depend on the split,
        because their formulas are over one micro-batch.
        """
        self._trained("train")
        self._require("params", "grads")
        for chunk in self._chunks:
            chunk.train()
        totals = share.totals
        # Megatron scales auxiliary losses, which are sums over tokens, and the loss by one factor. It makes the former
        # a mean, and `step` divides the loss by it.
        scale = 1.0 / max(1, totals.n_tokens)
        self._megatron_config.grad_scale_func = lambda value: value * scale
        step = partial(apply_loss, loss, 1.0 / (loss.normalizer(totals) * scale))
        start_mini_batch(self._routers)
        timers = StageTimers() if self.layout.pp > 1 else None
        with self._buffers.earlier_gradients():
            kept = self._run(share, step, asked_by(loss, self.head), backward=True, timers=timers)
        counts = self.groups.tp.rank() == 0 and self.groups.cp.rank() == 0
        metrics = reduce_metrics(kept, counts=counts)
        metrics["loss"] = Metric(metrics["loss"].sum / loss.normalizer(totals))
        if timers is not None:
            metrics[BUBBLE] = Metric(timers.bubble(self.groups.pp))
        if self.shape.is_moe:
            load_LE, losses_LK = expert_loads(self._routers, self.shape.n_layers, self.shape.n_experts)
            metrics |= load_metrics(load_LE, self.shape.moe_layers)
            metrics |= auxiliary_losses(LOSSES, losses_LK, load_LE, self.shape)
            self._load_LE = load_LE if self._load_LE is None else self._load_LE + load_LE
        return metrics

    def optim_step(self) -> StepResult:
        """Make an optimizer step; see `EngineBase.optim_step`."""
        self._buffers.has_gradients = False
        result = super().optim_step()
        if self._load_LE is not None and self.shape.router_bias and not result.skipped:
            for router in self._routers:
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
        total_PT = assemble_predictions(kept, what.n_rows, share.batch.n_tokens, self._device)
        dist.all_reduce(total_PT, group=self.groups.pp)  # zero on all stages but the last
        return total_PT.cpu()

    def export_stacks(self, readers: frozenset[int] | None = None) -> Iterator[Stack]:
        """Yield every whole weight; see `TrainingEngine.export_stacks`."""
        self._require("params")
        return self._bridge.export(self.weights, self._shards, readers=readers)

    def ema_weights(self, decay: float) -> EMAWeights:
        """Return this model's weights as an EMA, with this decay, of a model that they follow."""
        position, held = rank_grid(self.layout)[dist.get_rank()], self.held_weights()
        weights = {}
        for mapping, _ in self._bridge.mapped(self.weights):
            is_first = position.edp == 0 if mapping.domain == "expert" else position.dp == position.cp == 0
            weights[mapping.parameter] = HeldWeight(mapping, held[mapping.parameter], is_stored=is_first)
        return EMAWeights(weights, self._bridge.expected_names(), self._shards, decay)

    def held_weights(self) -> dict[str, torch.Tensor]:
        """Return the elements of each weight that this rank holds, flat, by the weight's name."""
        return {name: weight.detach().view(-1) for name, weight in self.weights.items()}

    def _blocks(self) -> Iterator[Block]:
        return shared_blocks(self._bridge.mapped(self.weights), self._shards)

    def load(self, folder: Path) -> None:
        """Load the training state; see `SavingVerbs.load`."""
        super().load(folder)
        self._buffers.has_gradients = False
        self._load_LE = None

    def offload(self, what: Collection[Offloadable] = OFFLOADABLE) -> int:
        """Give the device memory of parameters, gradients or optimizer state back, as `what` names.

        Parameters and optimizer state are copied to pinned host memory, gradients are lost. Call `onload` before the
        next method that needs what was moved. A model without an optimizer has parameters only, and optimizer state
        that is always on the host stays there.

        Returns:
            The bytes that were freed on this rank's device.
        """
        freed = self._buffers.park(what)
        if "grads" in what:
            self._load_LE = None
        if "optimizer" in what and self.optimizer is not None:
            freed += self.optimizer.state.park()
        self._away |= set(what)
        torch.cuda.empty_cache()
        return freed

    def onload(self, what: Collection[Offloadable] = OFFLOADABLE) -> int:
        """Bring back what `offload` moved; gradients are zero then.

        Returns:
            The bytes that were allocated on this rank's device.
        """
        allocated = self._buffers.fetch(what)
        if "optimizer" in what and self.optimizer is not None:
            allocated += self.optimizer.state.fetch()
        self._away -= set(what)
        return allocated

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
        cos_T1D, sin_T1D = cos_sin(local.positions_T, self._frequencies, dtype, self.shape.rope_scaling)
        return PackedSequences(qkv_format="thd", attention=local.attention, cos_T1D=cos_T1D, sin_T1D=sin_T1D)

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
        garbage collector cannot follow, so no engine would ever be freed. `timers` are those of the schedule.
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
