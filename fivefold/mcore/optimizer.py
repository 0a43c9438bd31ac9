"""AdamW through Megatron-Core's distributed optimizer: schedule, clipping, and steps skipped when not finite."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from fivefold.config.schema import OptimizerConfig
from fivefold.types import StepResult

StateKind = Literal["param", "exp_avg", "exp_avg_sq"]
STATE_KINDS: tuple[StateKind, ...] = ("param", "exp_avg", "exp_avg_sq")
"""Kinds of optimizer state: float32 master weights, and Adam's first and second moments."""


@dataclass(frozen=True)
class StateSlice:
    """This rank's part of one parameter's optimizer state: elements `start` to `end` of the flattened parameter."""

    name: str
    """Name of the parameter, as in `MegatronEngine.parameters`."""
    parameter: torch.nn.Parameter
    """The whole parameter of this rank."""
    start: int
    """First element of the slice, in the flattened parameter."""
    end: int
    """Element behind the slice."""
    stored: Mapping[StateKind, torch.Tensor]

    def get(self, kind: StateKind) -> torch.Tensor:
        """Return the state as float32 [end - start], which must not be changed in place."""
        return self.stored[kind]

    def set(self, kind: StateKind, values: torch.Tensor) -> None:
        """Replace the state by `values`, floating [end - start]."""
        self.stored[kind].copy_(values)


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

    def slices(self) -> Iterator[StateSlice]:
        """Yield this rank's slice of every parameter of which it holds optimizer state.

        After all slices were set, set `updates` and `steps`, then call `finish_loading`.
        """
        names = {parameter: name for name, parameter in self._parameters.items()}
        for part in self.megatron.chained_optimizers:
            for parameter, (group, order) in part.model_param_group_index_map.items():
                main = part.optimizer.param_groups[group]["params"][order]
                state = part.optimizer.state[main]
                if not state:
                    state |= {
                        "step": torch.zeros((), dtype=torch.float32, device=main.device),
                        "exp_avg": torch.zeros_like(main.data),
                        "exp_avg_sq": torch.zeros_like(main.data),
                    }
                where = part._get_model_param_range_map(parameter)["param"]
                stored = {"param": main.data, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
                yield StateSlice(names[parameter], parameter, where.start, where.end, stored)

    def finish_loading(self) -> None:
        """Take over `updates`, and bring the weights of all ranks in line with the slices that were set.

        All ranks of the model call it together.
        """
        for part in self.megatron.chained_optimizers:
            for state in part.optimizer.state.values():
                if "step" in state:
                    state["step"].fill_(self.updates)
            part._copy_main_params_to_model_params()
        for chunk in self.chunks:
            chunk.start_param_sync()

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
