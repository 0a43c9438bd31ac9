"""Megatron-Core's own fields in a recipe, checked before a process is started."""

from __future__ import annotations

from fivefold.config.schema import EngineConfig
from fivefold.layout.parallel import ParallelLayout
from fivefold.layout.shape import ModelShape


def check_overrides(model: EngineConfig, layout: ParallelLayout, shape: ModelShape) -> None:
    """Check `megatron.transformer`, `megatron.ddp` and `megatron.optimizer` against Megatron-Core's dataclasses.

    Raises:
        ValueError: a field that there is not, of another type, or that Fivefold sets itself.
    """
    if not (model.megatron.transformer or model.megatron.ddp or model.megatron.optimizer):
        return
    # Imported only where there is something to check: it takes seconds.
    from fivefold.mcore import settings

    settings.check(model, layout, shape)
