"""Whether the package fla-core computes a model's gated delta nets on GPUs. It needs no torch."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

PACKAGE = "fla-core"
LEAST = Version("0.6.0")
"""The first release whose results were compared with the recurrence."""
_WIDTHS = (128, 128)
"""Channels of a key and a value head for which they were compared, which the published models have."""
_LEAST_TRITON = Version("3.7.1")
"""The package refuses the backward pass on Hopper GPUs with Triton from 3.4 on and before this release, which computes
wrong gradients there."""


def obstacle(dtype: str, widths: tuple[int, int], *, deterministic: bool) -> str | None:
    """Return why the package does not compute a model's delta rule on GPUs, with the remedy; None: it does.

    Args:
        dtype: dtype of the model, such as `bfloat16`.
        widths: channels of a key head and of a value head.
        deterministic: whether only kernels may run that give the same bits in every run.
    """
    if dtype != "bfloat16":
        return f"{PACKAGE} is for bfloat16 models"
    if widths != _WIDTHS:
        return f"{PACKAGE} is for heads of {_WIDTHS[0]} and {_WIDTHS[1]} channels, not {widths[0]} and {widths[1]}"
    if deterministic:
        # It times variants of each kernel and keeps the fastest, so that another run may add in another order.
        return f"{PACKAGE} does not promise the same bits in every run"
    return missing()


def described(dtype: str, widths: tuple[int, int], *, deterministic: bool) -> str:
    """Return what computes the delta rule on GPUs, in a few words; arguments as of `obstacle`."""
    reason = obstacle(dtype, widths, deterministic=deterministic)
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
