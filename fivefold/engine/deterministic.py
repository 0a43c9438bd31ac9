"""Kernels and collectives that give the same bits in every run."""

from __future__ import annotations

import os

import torch


def make_deterministic() -> None:
    """Allow only kernels that give the same bits every time. Call it before the device's first matrix product."""
    # cuBLAS reads this when it makes a handle. Without it, its algorithm depends on the stream.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # NCCL reads this when it makes a communicator. Its own choice of algorithm may add in another order next time.
    os.environ.setdefault("NCCL_ALGO", "Ring")
    torch.use_deterministic_algorithms(True)
    # In deterministic mode torch fills all memory that it allocates with NaN, so that reads of unwritten memory are the
    # same in every run. Nothing here reads such memory, and filling it takes time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
