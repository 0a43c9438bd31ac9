"""Builds the training engine of a layout's backend. Workers import only the one that they run."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from fivefold.config.schema.engine import EngineConfig
from fivefold.engine.contract import EngineOptions, TrainingEngine
from fivefold.imports import large_imports
from fivefold.layout.parallel import ParallelLayout

ENGINES = {"megatron": ("fivefold.mcore.engine", "MegatronEngine"), "fsdp": ("fivefold.fsdp.engine", "FSDPEngine")}
"""Module and class of the engine of each backend that trains."""


def build_engine(config: EngineConfig, layout: ParallelLayout, options: EngineOptions) -> TrainingEngine:
    """Return the engine of `layout.backend`. All processes of the model call this together.

    Args:
        config: the model and its options.
        layout: how the model is spread over processes.
        options: what else it is built with.

    Raises:
        ValueError: a layout or an option that the model or the engine cannot take, or weights that do not fit.
    """
    return _engine_class(layout.backend)(config, layout, options)


def engine_module(backend: str) -> str:
    """Return the module of the engine of a backend.

    Raises:
        ValueError: the backend does not train.
    """
    if backend not in ENGINES:
        raise ValueError(f"the backend {backend!r} does not train: use {' or '.join(ENGINES)}")
    module, _ = ENGINES[backend]
    return module


def _engine_class(backend: str) -> Callable[..., TrainingEngine]:
    module, (_, name) = engine_module(backend), ENGINES[backend]
    with large_imports():
        engine: Callable[..., TrainingEngine] = getattr(importlib.import_module(module), name)
    return engine
