"""AdamW through Megatron-Core's distributed optimizer: schedule, clipping, and steps skipped when not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from fivefold.config.schema import OptimizerConfig
from fivefold.types import StepResult


def learning_rate(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """Return the rate of step `step` (from 0) of `total_steps`: linear warm-up, then constant, linear or cosine.

    No step has rate 0: the first of a warm-up of n steps has rate lr / n, and a decay reaches `min_lr_ratio` one step
    after the last, as the schedules of torch and transformers do.
    """
    # Rounded first: 7 % of 100 steps are 7, but 0.07 * 100 is a little more.
    warmup = math.ceil(round(config.warmup_steps_proportion * total_steps, 6))
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    decay = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[config.lr_scheduler_type]
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * decay)


class Optimizer:
    """Megatron-Core's optimizer for the model's chunks, and the place in the learning-rate schedule."""

    def __init__(
        self,
        config: OptimizerConfig,
        megatron_config: MegatronOptimizerConfig,
        chunks: list[DistributedDataParallel],
        parameters: Mapping[str, torch.nn.Parameter],
        total_steps: int,
    ) -> None:
        self._config = config
        self.chunks = chunks
        self._parameters = parameters
        self._total_steps = total_steps
        self.steps = 0
        """Steps made, skipped ones included: the place in the schedule."""
        self.updates = 0
        """Steps that changed the weights: Adam's own count, for its bias correction."""
        self.megatron: MegatronOptimizer = get_megatron_optimizer(
            megatron_config,
            chunks,
            config_overrides=get_standard_config_overrides(megatron_config),
            use_gloo_process_groups=False,
        )
        for group in self.megatron.param_groups:
            # Exempting norms and biases is left to Megatron-Core's own scheduler, which is not used here.
            group["weight_decay"] = config.weight_decay * group["wd_mult"]
            # Megatron-Core builds torch's AdamW with its defaults, which launch a kernel for each operation of a step.
            group["fused"], group["foreach"] = True, False

    def step(self) -> StepResult:
        """Clip the gradient, update the weights, advance the schedule. A non-finite gradient changes no weight."""
        rate = learning_rate(self.steps, self._config, self._total_steps)
        for group in self.megatron.param_groups:
            group["lr"] = rate
        self.steps += 1
        self.megatron.prepare_grads()
        norm = float(self.megatron.get_grad_norm())
        if not math.isfinite(norm):
            names = self._non_finite()
            self.zero_grad()
            return StepResult(norm, rate, skipped=True, non_finite=names)
        if self._config.gradient_clipping > 0:
            self._clip(norm)
        self.megatron.step_with_ready_grads()
        self.updates += 1
        self.zero_grad()
        return StepResult(norm, rate, skipped=False)

    def zero_grad(self) -> None:
        """Clear all accumulated gradients."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()

    def _clip(self, norm: float) -> None:
        for optimizer in self.megatron.chained_optimizers:
            parameters = optimizer.get_parameters()
            if parameters:
                clip_grad_by_total_norm_fp32(parameters, max_norm=self._config.gradient_clipping, total_norm=norm)

    def _non_finite(self, limit: int = 8) -> tuple[str, ...]:
        local = [
            name for name, parameter in self._parameters.items() if not vars(parameter)["main_grad"].isfinite().all()
        ]
        gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, local[:limit])
        return tuple(dict.fromkeys(name for names in gathered for name in names))[:limit]
