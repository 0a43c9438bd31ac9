"""The first import of Megatron-Core in a process. It comes before `compat`, which patches what was imported."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

TRACKERS = ("wandb", "torch.utils.tensorboard")
"""Modules that Megatron-Core imports where they are installed."""


def import_megatron() -> None:
    """Import Megatron-Core without what a trainer has no use for."""
    with ExitStack() as patches:
        patches.enter_context(_without_trackers())
        if not torch.cuda.is_available():
            patches.enter_context(_without_compilers())
            _keep_compilers_from_optimizers()
        importlib.import_module("megatron.core")


@contextmanager
def _without_trackers() -> Iterator[None]:
    """Let imports inside the block find no package of `TRACKERS`, unless it was imported before.

    Symptom: every trainer needs half a second more of a core, and tens of MB, if wandb is installed. Cause: two modules
    of Megatron-Core, one for timers and one for inference, import it to have its name. Remove when: they import it
    where they use it.
    """
    hidden = [name for name in TRACKERS if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def _without_compilers() -> mock._patch[Callable[..., Any]]:
    """Let functions stay as they are inside the block, though they are decorated with torch.compile.

    Symptom: without CUDA the import takes twice as long, and first steps wait for a C++ compiler. Cause: the decorator
    imports PyTorch's compilers at once. Remove when: `megatron.core.jit` lets one choose the decorator before the rest
    is imported.
    """
    return mock.patch.object(torch, "compile", _uncompiled)


def _keep_compilers_from_optimizers() -> None:
    """Let methods of torch.optim run as they are, though they are decorated with `torch._disable_dynamo`.

    Symptom: the first optimizer of a process takes 0.7 s of a core. Cause: the decorator imports PyTorch's compilers
    to keep them from a method, though nothing is compiled without CUDA. Remove when: it asks whether they are imported.
    """
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        method = vars(torch.optim.Optimizer)[name].__wrapped__
        setattr(method, "__dynamo_disable", method)


def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Stand in for torch.compile as a decorator without arguments."""
    return function
