"""The gated delta rule by the Triton kernels of the package fla-core, for bfloat16 models on GPUs.

spans (3, 2)   ─>   cu_seqlens [0, 3, 5]: packed sequences are one row of the package's batch
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

import torch

from fivefold.families.fla_core import obstacle


def computes(key_THD: torch.Tensor, value_TVE: torch.Tensor) -> bool:
    """Return whether the package computes the rule for such heads in this process."""
    widths = key_THD.shape[2], value_TVE.shape[2]
    deterministic = torch.are_deterministic_algorithms_enabled()
    return (
        key_THD.is_cuda
        and obstacle(str(key_THD.dtype).removeprefix("torch."), widths, deterministic=deterministic) is None
    )


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
