"""The memory of this process's GPUs, from the CUDA driver, without a context, which would take memory of its own."""

from __future__ import annotations

import ctypes
from typing import Any

DRIVER = "libcuda.so.1"
"""The driver's library. torch makes a context as soon as it is asked, and keeps it until the process ends."""


def least_gpu_memory() -> int | None:
    """Return the bytes of the smallest GPU that this process may use; None: it has no GPU, or no driver for one."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return None
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return None
    return min((_memory(driver, index) for index in range(count.value)), default=None)


def _memory(driver: Any, index: int) -> int:
    device, size = ctypes.c_int(), ctypes.c_size_t()
    status = driver.cuDeviceGet(ctypes.byref(device), index)
    status = status or driver.cuDeviceTotalMem_v2(ctypes.byref(size), device)
    if status:
        raise RuntimeError(f"the CUDA driver does not tell the memory of GPU {index}: its error is {status}")
    return size.value
