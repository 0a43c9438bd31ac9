"""Patches that let Megatron-Core run on CPU tensors and gloo, in a process without CUDA.

Each patch states its symptom, its cause and the condition for its removal.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from megatron.core.tensor_parallel import random as megatron_random
from torch.utils._device import _device_constructors

_CPU = torch.device("cpu")


def prepare() -> None:
    """Patch Megatron-Core, and what it calls of torch, in this process."""
    _redirect_tensors()
    _redirect_runtime()
    _redirect_rng_tracker()


def _redirect_tensors() -> None:
    """Symptom: "Torch not compiled with CUDA enabled" all over Megatron-Core.

    Cause: `device="cuda"`, `pin_memory=True`, `.cuda()`, `.pin_memory()` and the type name `torch.cuda.FloatTensor` are
    written out in it. Remove when: Megatron-Core takes its device from one place.

    Its modules get a copy of the module `torch` in which the functions that make tensors take "cuda" for the CPU. The
    functions themselves stay as they are for everybody else, among them `torch.device` as a context, which knows them
    by identity. A `TorchFunctionMode` would do the same, but it costs time at every call of a torch function.
    """
    on_cpu = types.ModuleType("torch")
    vars(on_cpu).update(vars(torch))
    makers: set[Any] = _device_constructors()
    for name in [name for name, value in vars(torch).items() if callable(value) and value in makers]:
        setattr(on_cpu, name, _on_cpu(vars(torch)[name]))
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.") and vars(module).get("torch") is torch:
            module.torch = on_cpu  # type: ignore[attr-defined]
    torch.Tensor.cuda = lambda self, *_args, **_options: self  # type: ignore[method-assign]
    torch.Tensor.pin_memory = lambda self, *_args: self  # type: ignore[method-assign]
    torch.Tensor.type = _type  # type: ignore[assignment, method-assign]


def _on_cpu(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a function that makes tensors, in memory that is not pinned, on the CPU where it is asked for CUDA."""

    @wraps(function)
    def redirected(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if str(options.get("device")).startswith("cuda"):
            options["device"] = _CPU
        return function(*args, **options)

    return redirected


_own_type = torch.Tensor.type


def _type(self: torch.Tensor, *args: Any, **options: Any) -> Any:
    """Convert a tensor, or without arguments say the type that it would have on CUDA, which the optimizers compare."""
    if args or options:
        return _own_type(self, *args, **options)
    return str(_own_type(self)).replace("torch.", "torch.cuda.")


class _Anything:
    """Stands in for a CUDA stream or event: every method exists, does nothing and returns the object itself."""

    def __init__(self, *_args: Any, **_options: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., _Anything]:
        return lambda *args, **options: self


def _redirect_runtime() -> None:
    """Symptom: calls of torch.cuda's runtime (streams, events, synchronize) raise without a driver.

    Cause: Megatron-Core calls them without asking whether CUDA is there. Remove when: it asks.
    """
    for module, names in (
        (torch.cuda, ("set_device", "synchronize", "empty_cache")),
        (torch.cuda.nvtx, ("range_push", "range_pop")),
    ):
        for name in names:
            # One function object for each name: torch.compile has a rule for each and refuses an object with two.
            setattr(module, name, lambda *args, **options: None)
    torch.cuda.current_device = lambda: _CPU  # type: ignore[assignment, return-value]
    for name in ("Stream", "Event"):
        # They stay types, because libraries that are imported later use them in annotations.
        setattr(torch.cuda, name, type(name, (_Anything,), {}))
    for name in ("current_stream", "default_stream"):
        setattr(torch.cuda, name, lambda *args, **options: _Anything())
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment, return-value]


def _redirect_rng_tracker() -> None:
    """Symptom: Megatron's RNG tracker (activation recomputation, initialisation) asks for CUDA generators.

    Cause: it has no CPU generator. Remove when: it takes the device's.
    """
    torch.cuda.manual_seed = torch.manual_seed  # type: ignore[assignment]
    torch.cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)  # type: ignore[assignment]
    megatron_random._get_cuda_rng_state = lambda *args, **options: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *args, **options: torch.set_rng_state(state)
