"""AdamW over the shards of this rank: schedule, clipping, and steps skipped when not finite."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.config.schema.engine import OptimizerConfig
from fivefold.config.schema.fsdp import FSDPOptimizerFields
from fivefold.engine.contract import StepResult
from fivefold.engine.state.loss_scale import LossScale
from fivefold.engine.state.optimizer_state import (
    AdamStep,
    OptimizerState,
    StateFormat,
    StateKind,
    clip_factor,
    learning_rate,
)
from fivefold.engine.state.optimizer_state import Shard as StateShard
from fivefold.engine.state.slices import FixedSlice, StateSlice, state_slices
from fivefold.fsdp.groups import Groups
from fivefold.fsdp.shards import Shard, Shards, local_elements
from fivefold.fsdp.tensor_parallel import is_used_in_parts

_LISTED = 8
"""Most parameters that a skipped step names."""


class Optimizer:
    """AdamW, and the place in the learning-rate schedule. All ranks call each method together."""

    def __init__(
        self,
        config: OptimizerConfig,
        fields: FSDPOptimizerFields,
        shards: Shards,
        groups: Groups,
        device: torch.device,
        total_steps: int,
        scale: LossScale,
    ) -> None:
        """Build the state of the parameters' present values.

        Args:
            config: hyper-parameters.
            fields: variant of Adam, number formats of the moments, and where they are kept.
            shards: this rank's shards; those that are trained are float32.
            groups: the groups of this process.
            device: the device that the shards are on.
            total_steps: optimizer steps of the whole run, for the learning-rate schedule.
            scale: factor of the loss.
        """
        self._config = config
        self._decoupled = fields.decoupled_weight_decay
        self._groups = groups
        self._device = device
        self._total_steps = total_steps
        self.steps = 0
        """Steps made, skipped ones included: the place in the schedule."""
        self.updates = 0
        """Steps that changed the weights: Adam's own count, for its bias correction."""
        self.loss_scale = scale
        """Factor of the loss whose gradient is accumulated."""
        self._shards = [shard for shard in shards if shard.has_gradient]
        self._fixed = [FixedSlice(each.name, each.values_N, each.is_stored) for each in shards.parameters.offsets]
        self._options = {decays: _options(config, decays=decays) for decays in (True, False)}
        self._parts = [self._part(shard) for shard in self._shards]
        self.state = OptimizerState(self._parts, state_format(fields, device))

    def _part(self, shard: Shard) -> StateShard:
        # Norms and biases, an expert's too, have one dimension, and are exempt from weight decay.
        options = self._options[len(shard.mapping.tensors[0].shape) > 1]
        return StateShard(shard.name, shard.tensor, shard.begin, shard.values_N, options)

    def step(self) -> StepResult:
        """Clip the gradient, update the weights, advance the schedule. A non-finite gradient changes no weight."""
        rate = learning_rate(self.steps, self._config, self._total_steps)
        for options in self._options.values():
            options["lr"] = rate
        self.steps += 1
        grads = [self._gradient(shard) for shard in self._shards]
        scale, shown = self.loss_scale.value, self.loss_scale.shown
        norm = self._gradient_norm(grads) / scale
        self.loss_scale.after(is_finite=math.isfinite(norm))
        if not math.isfinite(norm):
            names = self._non_finite(grads)
            self.zero_grad()
            return StepResult(norm, rate, skipped=True, loss_scale=shown, non_finite=names)
        self.updates += 1
        for part, grad_N in zip(self._parts, grads, strict=True):
            vars(part.weight_N)["decoupled_grad"] = grad_N
        clip = clip_factor(norm, self._config.gradient_clipping) / scale
        self.state.update(AdamStep(self.updates, clip, self._decoupled))
        self.zero_grad()
        return StepResult(norm, rate, skipped=False, loss_scale=shown)

    def slices(self) -> Iterator[StateSlice | FixedSlice]:
        """Yield this rank's slice of every parameter with optimizer state, and what no gradient changes."""
        yield from state_slices(self.state)
        yield from self._fixed

    def finish_loading(self) -> None:
        """Do nothing: every rank has set its own weights, and they are gathered when they are used."""

    def zero_grad(self) -> None:
        """Clear all accumulated gradients."""
        for shard, part in zip(self._shards, self._parts, strict=True):
            shard.tensor.grad = None
            vars(part.weight_N).pop("decoupled_grad", None)

    def _gradient(self, shard: Shard) -> Tensor:
        """Return the gradient of a shard, summed over all ranks, float32 [N]."""
        grad_N = gradient(shard.tensor)
        if self._groups.tp.size() > 1 and is_used_in_parts(shard.mapping):
            dist.all_reduce(grad_N, group=self._groups.tp)
        return grad_N

    @torch.no_grad()
    def _gradient_norm(self, grads: list[Tensor]) -> float:
        """Return the norm of the whole gradient, summed in float32."""
        leads = self._groups.tp.rank() == 0
        counted = [
            grad_N for shard, grad_N in zip(self._shards, grads, strict=True) if leads or not shard.mapping.is_whole
        ]
        norms = [torch.linalg.vector_norm(grad_N, dtype=torch.float32) for grad_N in counted]
        square = torch.stack(norms).square().sum() if norms else torch.zeros((), device=self._device)
        dist.all_reduce(square)
        return math.sqrt(float(square))

    def _non_finite(self, grads: list[Tensor]) -> tuple[str, ...]:
        """Return the first few parameters whose gradient is not finite on some rank."""
        local = [shard.name for shard, grad_N in zip(self._shards, grads, strict=True) if not grad_N.isfinite().all()]
        gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, local[:_LISTED])
        return tuple(dict.fromkeys(name for names in gathered for name in names))[:_LISTED]


def state_format(fields: FSDPOptimizerFields, device: torch.device) -> StateFormat:
    """Return the format that the recipe chooses. The shards are float32 and their own master weights."""
    kinds: dict[StateKind, torch.dtype] = {
        "exp_avg": getattr(torch, fields.exp_avg_dtype),
        "exp_avg_sq": getattr(torch, fields.exp_avg_sq_dtype),
    }
    # The memory of a CPU process is the host's anyway.
    return StateFormat(kinds, on_host=fields.state_on == "host" and device.type == "cuda")


def gradient(parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter's accumulated gradient, flat; zeros if there is none."""
    return torch.zeros_like(local_elements(parameter)) if parameter.grad is None else local_elements(parameter.grad)


def _options(config: OptimizerConfig, *, decays: bool) -> dict[str, Any]:
    """Return a parameter group in torch's form."""
    return {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "weight_decay": config.weight_decay if decays else 0.0,
    }
