"""Reinforcement learning for mixture-of-experts language models on Megatron-Core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fivefold.api import Run

__all__ = ["Run", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import what Python programs use when they ask for it: the command line starts without it."""
    if name != "Run":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fivefold.api import Run

    return Run
