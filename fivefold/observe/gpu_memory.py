"""Memory and names of this process's GPUs, from the CUDA driver, without a context, which would take memory."""

from __future__ import annotations

import ctypes
from typing import Any

DRIVER = "libcuda.so.1"
"""The driver's library. torch makes a context as soon as it is asked, and keeps it until the process ends."""


def least_gpu_memory() -> int | None:
    """Return the bytes of the smallest GPU that this process may use; None: it has no GPU, or no driver for one."""
    driver, count = _driver()
    return min((_memory(driver, index) for index in range(count)), default=None)


def gpu_names() -> list[str]:
    """Return the name of each GPU that this process may use, such as `NVIDIA H200`."""
    driver, count = _driver()
    return [_name(driver, index) for index in range(count)]


def _driver() -> tuple[Any, int]:
    """Return the driver and the number of its GPUs, which is 0 without a driver."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return None, 0
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return None, 0
    return driver, count.value


def _name(driver: Any, index: int) -> str:
    device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    status = driver.cuDeviceGet(ctypes.byref(device), index)
    status = status or driver.cuDeviceGetName(name, len(name), device)
    if status:
        raise RuntimeError(f"the CUDA driver does not tell the name of GPU {index}: its error is {status}")
    return name.value.decode()


def _memory(driver: Any, index: int) -> int:
    device, size = ctypes.c_int(), ctypes.c_size_t()
    status = driver.cuDeviceGet(ctypes.byref(device), index)
    status = status or driver.cuDeviceTotalMem_v2(ctypes.byref(size), device)
    if status:
        raise RuntimeError(f"the CUDA driver does not tell the memory of GPU {index}: its error is {status}")
    return size.value
