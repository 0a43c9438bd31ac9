"""Kernels and collectives that give the same bits in every run."""

from __future__ import annotations

import os

import torch


def make_deterministic() -> None:
    """Allow only kernels that give the same bits every time. Call it before the device's first matrix product."""
    # cuBLAS reads this when its handle is made; without it, another stream may get another algorithm.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # NCCL reads this when a communicator is made; what it chooses otherwise may add in another order in the next run.
    os.environ.setdefault("NCCL_ALGO", "Ring")
    torch.use_deterministic_algorithms(True)
    # With it, torch writes NaN into all memory that it allocates, so that what reads it unwritten reads the same in
    # every run. Nothing here reads such memory, and the writing takes time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
