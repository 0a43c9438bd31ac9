"""Builds the training engine of a layout's backend. Workers import only the one that they run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fivefold.config.schema.engine import EngineConfig
from fivefold.engine.contract import TrainingEngine
from fivefold.imports import large_imports
from fivefold.layout.parallel import ParallelLayout

if TYPE_CHECKING:
    from fivefold.fsdp.engine import FSDPEngine
    from fivefold.mcore.engine import MegatronEngine


def build_engine(config: EngineConfig, layout: ParallelLayout, **options: Any) -> TrainingEngine:
    """Return the engine of `layout.backend`. All processes of the model call this together.

    Args:
        config: the model and its options.
        layout: how the model is spread over processes.
        options: keyword arguments that the engines have in common, such as `seed` and `optimizer`.

    Raises:
        ValueError: a layout or an option that the model or the engine cannot take, or weights that do not fit.
    """
    return _engine_class(layout.backend)(config, layout, **options)


def _engine_class(backend: str) -> type[MegatronEngine] | type[FSDPEngine]:
    with large_imports():
        if backend == "megatron":
            from fivefold.mcore.engine import MegatronEngine

            return MegatronEngine
        if backend == "fsdp":
            from fivefold.fsdp.engine import FSDPEngine

            return FSDPEngine
    raise ValueError(f"the backend {backend!r} does not train: use megatron or fsdp")
