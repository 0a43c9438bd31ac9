"""The first import of Megatron-Core in a process. It comes before `compat`, which patches what was imported."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch


def import_megatron() -> None:
    """Import Megatron-Core, whose functions are not compiled unless there is CUDA.

    Symptom: without CUDA the import takes twice as long, and first steps wait for a C++ compiler. Cause: functions are
    decorated with torch.compile, which imports PyTorch's compilers at once. Remove when: `megatron.core.jit` lets one
    choose the decorator before the rest is imported.
    """
    if torch.cuda.is_available():
        return
    with mock.patch.object(torch, "compile", _uncompiled):
        importlib.import_module("megatron.core")


def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Stand in for torch.compile as a decorator without arguments."""
    return function
