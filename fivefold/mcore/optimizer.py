"""AdamW through Megatron-Core's distributed optimizer: schedule, clipping, and steps skipped when not finite."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig

from fivefold.bridge.parameters import Parameter, Parameters
from fivefold.config.schema.engine import OptimizerConfig
from fivefold.engine.contract import StepResult
from fivefold.engine.state.loss_scale import LossScale
from fivefold.engine.state.optimizer_state import (
    AdamStep,
    OptimizerState,
    Shard,
    StateFormat,
    clip_factor,
    learning_rate,
)
from fivefold.engine.state.slices import FixedSlice, StateSlice, state_slices
from fivefold.mcore.releases import GRADIENTS_FOR_NORM


class Optimizer:
    """Megatron-Core's distributed optimizer over our own state, and the place in the learning-rate schedule.

    Megatron-Core divides the parameters over data-parallel ranks, and sums gradients and their norm; it keeps no state.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        megatron_config: MegatronOptimizerConfig,
        form: StateFormat,
        chunks: list[DistributedDataParallel],
        parameters: Parameters[Parameter],
        total_steps: int,
        scale: LossScale,
    ) -> None:
        """Build the state of the parameters' present values.

        Args:
            config: hyper-parameters.
            megatron_config: the same in Megatron-Core's form, as `settings.optimizer_config` makes it.
            form: number formats of the state, and where it is kept.
            chunks: the model's chunks.
            parameters: this rank's parameters.
            total_steps: optimizer steps of the whole run, for the learning-rate schedule.
            scale: factor of the loss.
        """
        self._fixed = [FixedSlice(each.name, each.values_N, each.is_stored) for each in parameters.offsets]
        self._config = config
        self._decoupled = megatron_config.decoupled_weight_decay
        self.chunks = chunks
        self._trained = parameters.with_gradient
        self._total_steps = total_steps
        self.steps = 0
        """Steps made, skipped ones included: the place in the schedule."""
        self.updates = 0
        """Steps that changed the weights: Adam's own count, for its bias correction."""
        self.loss_scale = scale
        """Factor of the loss whose gradient is accumulated."""
        self.megatron: MegatronOptimizer = get_megatron_optimizer(
            megatron_config,
            chunks,
            config_overrides=get_standard_config_overrides(megatron_config),
            use_gloo_process_groups=False,
        )
        for group in self.megatron.param_groups:
            # Exempting norms and biases is left to Megatron-Core's own scheduler, which is not used here.
            group["weight_decay"] = config.weight_decay * group["wd_mult"]
        self._shards = list(self._find_shards())
        self.state = OptimizerState(self._shards, form)

    def _find_shards(self) -> Iterator[Shard]:
        names = {each.tensor: each.name for each in self._trained}
        for part in self.megatron.chained_optimizers:
            if part.is_stub_optimizer:  # of a rank that trains nothing
                continue
            for parameter, (group, order) in part.model_param_group_index_map.items():
                options = part.optimizer.param_groups[group]
                start = part._get_model_param_range_map(parameter)["param"].start
                yield Shard(names[parameter], parameter, start, options["params"][order], options)

    def step(self) -> StepResult:
        """Clip the gradient, update the weights, advance the schedule. A non-finite gradient changes no weight."""
        rate = learning_rate(self.steps, self._config, self._total_steps)
        for group in self.megatron.param_groups:
            peak, end = group["max_lr"], group["min_lr"]
            group["lr"] = learning_rate(self.steps, self._config, self._total_steps, peak, end)
        self.steps += 1
        self.megatron.prepare_grads()
        scale, shown = self.loss_scale.value, self.loss_scale.shown
        norm = self._gradient_norm() / scale
        self.loss_scale.after(is_finite=math.isfinite(norm))
        if not math.isfinite(norm):
            names = self._non_finite()
            self.zero_grad()
            return StepResult(norm, rate, skipped=True, loss_scale=shown, non_finite=names)
        self.updates += 1
        clip = clip_factor(norm, self._config.gradient_clipping) / scale
        self.state.update(AdamStep(self.updates, clip, self._decoupled))
        self._share_weights()
        self.zero_grad()
        return StepResult(norm, rate, skipped=False, loss_scale=shown)

    def slices(self) -> Iterator[StateSlice | FixedSlice]:
        """Yield this rank's slice of every parameter whose optimizer state it holds, and what no gradient changes.

        After all slices were set, set `updates` and `steps`, then call `finish_loading`.
        """
        yield from state_slices(self.state)
        yield from self._fixed

    def finish_loading(self) -> None:
        """Bring the weights of all ranks in line with the slices that were set. All ranks call it together."""
        self._share_weights()

    def zero_grad(self) -> None:
        """Clear all accumulated gradients."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()

    def _share_weights(self) -> None:
        """Send the elements that this rank updated to the ranks that hold the same parameters."""
        for chunk in self.chunks:
            chunk.start_param_sync()

    @torch.no_grad()
    def _gradient_norm(self) -> float:
        """Return the norm of the whole gradient, summed in float32 whatever its dtype.

        Megatron-Core's own function rounds the norms of bfloat16 gradients, and waits for the device at each tensor.
        """
        grads = [grad for part in self.megatron.chained_optimizers for grad in getattr(part, GRADIENTS_FOR_NORM)()]
        norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads]
        device = torch.cuda.current_device()
        square = torch.linalg.vector_norm(torch.stack(norms)) ** 2 if norms else torch.zeros((), device=device)
        dist.all_reduce(square, group=self.megatron.get_grad_stats_parallel_group())
        return math.sqrt(float(square))

    def _non_finite(self, limit: int = 8) -> tuple[str, ...]:
        local = [each.name for each in self._trained if not vars(each.tensor)["main_grad"].isfinite().all()]
        gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, local[:limit])
        return tuple(dict.fromkeys(name for names in gathered for name in names))[:limit]
