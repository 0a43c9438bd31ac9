"""The gated delta rule by the Triton kernels of the package fla-core, for bfloat16 models on GPUs.

spans (3, 2)   ─>   cu_seqlens [0, 3, 5]: packed sequences are one row of the package's batch
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from packaging.version import Version

PACKAGE = "fla-core"
LEAST = Version("0.6.0")
"""The first release whose results were compared with the recurrence."""
_WIDTHS = (128, 128)
"""Channels of a key and a value head for which they were compared, which the published models have."""
_LEAST_TRITON = Version("3.7.1")
"""The package refuses the backward pass on Hopper GPUs with Triton from 3.4 on and before this release, which computes
wrong gradients there."""


def obstacle(dtype: torch.dtype, widths: tuple[int, int], *, deterministic: bool) -> str | None:
    """Return why the package does not compute a model's delta rule on GPUs, with the remedy; None: it does.

    Args:
        dtype: dtype of the model.
        widths: channels of a key head and of a value head.
        deterministic: whether only kernels may run that give the same bits in every run.
    """
    if dtype != torch.bfloat16:
        return f"{PACKAGE} is for bfloat16 models"
    if widths != _WIDTHS:
        return f"{PACKAGE} is for heads of {_WIDTHS[0]} and {_WIDTHS[1]} channels, not {widths[0]} and {widths[1]}"
    if deterministic:
        # It times variants of each kernel and keeps the fastest, so that another run may add in another order.
        return f"{PACKAGE} does not promise the same bits in every run"
    return missing()


def described(dtype: str, widths: tuple[int, int], *, deterministic: bool) -> str:
    """Return what computes the delta rule on GPUs, in a few words; arguments as of `obstacle`."""
    reason = obstacle(getattr(torch, dtype), widths, deterministic=deterministic)
    return f"{PACKAGE} {_installed(PACKAGE)}" if reason is None else f"plain PyTorch: {reason}"


@cache
def missing() -> str | None:
    """Return what this environment lacks to use the package, and the remedy; None: nothing."""
    package, triton = _installed(PACKAGE), _installed("triton")
    if package is None or package < LEAST:
        return f"pip install -U 'fivefold[delta]' brings {PACKAGE} {LEAST}, with faster kernels"
    if triton is None or triton < _LEAST_TRITON:
        return f"{PACKAGE} needs Triton {_LEAST_TRITON}, which torch brings from 2.12.1 on; here is {triton or 'none'}"
    return None


def _installed(package: str) -> Version | None:
    try:
        return Version(version(package))
    except PackageNotFoundError:
        return None


def computes(key_THD: torch.Tensor, value_TVE: torch.Tensor) -> bool:
    """Return whether the package computes the rule for such heads in this process."""
    widths = key_THD.shape[2], value_TVE.shape[2]
    deterministic = torch.are_deterministic_algorithms_enabled()
    return key_THD.is_cuda and obstacle(key_THD.dtype, widths, deterministic=deterministic) is None


def fla_gated_delta_rule(
    query_THD: torch.Tensor,
    key_THD: torch.Tensor,
    value_TVE: torch.Tensor,
    decay_TV: torch.Tensor,
    beta_TV: torch.Tensor,
    spans: Sequence[int],
) -> torch.Tensor:
    """Return the outputs [T, V, E]; arguments as of `delta_rule.gated_delta_rule`."""
    on_device, on_host = _boundaries(tuple(spans), query_THD.device)
    output, _ = _package()(
        *(each[None] for each in (query_THD, key_THD, value_TVE, decay_TV, beta_TV)),
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=on_device,
        cu_seqlens_cpu=on_host,
    )
    return output[0]


@lru_cache(maxsize=64)
def _boundaries(spans: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where sequences begin and end, int64, on the device and on the host, where the package counts chunks."""
    on_host = torch.tensor((0, *spans)).cumsum(0)
    return on_host.to(device), on_host


@cache
def _package() -> Callable[..., Any]:
    # Imported here, because it imports all kernels of the package, which takes seconds.
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    function: Callable[..., Any] = chunk_gated_delta_rule
    return function
