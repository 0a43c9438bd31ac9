"""What a run runs on: its command, the versions of its software, the machine and its GPUs."""

from __future__ import annotations

import ctypes
import platform
import shlex
import socket
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from fivefold import __version__

PACKAGES = ("torch", "megatron-core", "ray", "transformers", "safetensors")
"""Packages that a run's results depend on."""
DRIVER = "libcuda.so.1"
"""The CUDA driver's library. Asking torch instead would create a CUDA context, which takes memory until the process
ends."""


def about_run(title: str, facts: Mapping[str, object], total_steps: int | None) -> dict[str, Any]:
    """Return the content of `about.json`. `facts` are those that the screen shows before the run starts."""
    return {
        "title": title,
        "steps": total_steps,
        "facts": {name: str(value) for name, value in facts.items()},
        "command": command_line(),
        "folder": str(Path.cwd()),
        "versions": versions(),
        "machine": machine(),
    }


def command_line() -> str:
    """Return the command that resumes this process's run: its own command without `--overwrite`."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--overwrite"]
    return shlex.join(["fivefold", *arguments])


def versions() -> dict[str, str]:
    """Return the versions of Fivefold, Python and the main libraries by name, without importing the libraries."""
    found = {"fivefold": __version__, "python": platform.python_version()}
    return found | {name: installed for name in PACKAGES if (installed := _version(name))}


@cache
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def machine() -> dict[str, str]:
    """Return facts about the machine of this process."""
    names = gpu_names()
    gpus = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "none"
    return {
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": str(psutil.cpu_count()),
        "memory": f"{psutil.virtual_memory().total / 1e9:.0f} GB",
        "GPUs": gpus,
    }


def least_gpu_memory() -> int | None:
    """Return the bytes of the smallest GPU that this process may use; None without a GPU or its driver."""
    driver, count = _driver()
    return min((_memory(driver, index) for index in range(count)), default=None)


def gpu_names() -> list[str]:
    """Return the name of each GPU that this process may use, such as `NVIDIA H200`."""
    driver, count = _driver()
    return [_name(driver, index) for index in range(count)]


def _driver() -> tuple[Any, int]:
    """Return the CUDA driver and the number of its GPUs, which is 0 without a driver."""
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
        raise RuntimeError(f"the CUDA driver does not return the name of GPU {index}: its error is {status}")
    return name.value.decode()


def _memory(driver: Any, index: int) -> int:
    device, size = ctypes.c_int(), ctypes.c_size_t()
    status = driver.cuDeviceGet(ctypes.byref(device), index)
    status = status or driver.cuDeviceTotalMem_v2(ctypes.byref(size), device)
    if status:
        raise RuntimeError(f"the CUDA driver does not return the memory of GPU {index}: its error is {status}")
    return size.value
