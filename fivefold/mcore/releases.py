"""What differs between the modules of the supported releases of Megatron-Core.

What differs in their configuration is in `fivefold/families/megatron_release.py`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from fivefold.families.megatron_release import RELEASES, installed_release

IS_0_16 = installed_release() is RELEASES["0.16"]

GRADIENTS_FOR_NORM = "get_main_grads_for_grad_norm" if IS_0_16 else "get_grads_for_grad_norm"
"""The method of an optimizer that returns the gradients whose norms this rank counts."""


def experts(module: type) -> Any:
    """Return what `BackendSpecProvider.grouped_mlp_modules` returns for a class of experts without submodules."""
    return (module, None) if IS_0_16 else module


def submodules(mlp: Any) -> Any:
    """Return the submodules in what `get_mlp_module_spec_for_backend` returns, a spec or a function with arguments."""
    return mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules
