"""Megatron-Core's own configuration objects, from the plain values of `fivefold.families.megatron_settings`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.activations import quick_gelu
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from fivefold.config.schema.engine import EngineConfig, OptimizerConfig
from fivefold.config.schema.megatron import MegatronConfig
from fivefold.families.megatron_settings import Values, ddp_settings, optimizer_settings, transformer_settings
from fivefold.families.shape import ModelShape
from fivefold.layout.parallel import ParallelLayout

_STATE_FIELDS = ("exp_avg_dtype", "exp_avg_sq_dtype", "store_param_remainders")
"""Fields that Megatron-Core reads for its own optimizer state; here, `OptimizerState` keeps it in these formats."""


def transformer_config(config: EngineConfig, layout: ParallelLayout, shape: ModelShape) -> TransformerConfig:
    """Return Megatron-Core's config of a model with the recipe's options on a layout."""
    return TransformerConfig(**_objects(transformer_settings(config, layout, shape)))


def ddp_config(config: MegatronConfig, layout: ParallelLayout) -> DistributedDataParallelConfig:
    """Return the config of DDP, which sums gradients."""
    return DistributedDataParallelConfig(**ddp_settings(config, layout, on_gpu=torch.cuda.is_available()))


def optimizer_config(config: EngineConfig, optimizer: OptimizerConfig) -> MegatronOptimizerConfig:
    """Return the config of AdamW, sharded over data-parallel ranks, whose state is left to `OptimizerState`."""
    values = _objects(optimizer_settings(config, optimizer))
    formats = {name: values.pop(name) for name in _STATE_FIELDS}
    settings = MegatronOptimizerConfig(**values)
    # Megatron-Core then makes no float32 copy of the weights and hands gradients over in whatever dtype they have. Its
    # option of this effect, `use_precision_aware_optimizer`, refuses optimizers other than TransformerEngine's.
    settings.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    # Its checks allow these only with that option; they say what the state is.
    for name, value in formats.items():
        setattr(settings, name, value)
    return settings


def effective_values(config: Any) -> Values:
    """Return the values of all fields of one of Megatron-Core's configuration objects, as YAML can hold them."""
    return {field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config)}


def _leave(weight: torch.Tensor) -> None:
    """Initialise nothing."""


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """Return GELU by its approximation with tanh."""
    return F.gelu(x, approximate="tanh")


_FUNCTIONS = {"silu": F.silu, "quick_gelu": quick_gelu, "gelu_tanh": _gelu_tanh, "none": _leave}


def _objects(values: Mapping[str, Any]) -> Values:
    """Return the values with number formats and functions in place of their names."""
    objects = dict(values)
    for name, value in values.items():
        if name.endswith("dtype") and value in ("float32", "bfloat16", "float16"):
            objects[name] = getattr(torch, value)
        elif name in ("activation_func", "init_method", "output_layer_init_method"):
            objects[name] = _FUNCTIONS[value]
    return objects


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    name = next((name for name, function in _FUNCTIONS.items() if function is value), None)
    return name or str(getattr(value, "__name__", value))
