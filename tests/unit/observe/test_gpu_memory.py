"""The memory of GPUs as the CUDA driver tells it, with a stand-in for the driver."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from fivefold.observe.machine import DRIVER, least_gpu_memory


class Driver:
    """A driver of some GPUs, whose functions fail with the status that `failing` has for them."""

    def __init__(self, sizes: list[int], **failing: int) -> None:
        self._sizes, self._failing = sizes, failing

    def cuInit(self, flags: int) -> int:
        return self._failing.get("cuInit", 0)

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self._sizes)
        return self._failing.get("cuDeviceGetCount", 0)

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = 10 + index
        return 0

    def cuDeviceTotalMem_v2(self, size: Any, device: ctypes.c_int) -> int:
        size._obj.value = self._sizes[device.value - 10]
        return self._failing.get("cuDeviceTotalMem_v2", 0)


def use(monkeypatch: pytest.MonkeyPatch, driver: Driver | None) -> None:
    def load(name: str) -> Driver:
        assert name == DRIVER
        if driver is None:
            raise OSError("no such library")
        return driver

    monkeypatch.setattr(ctypes, "CDLL", load)


@pytest.mark.parametrize(
    ("driver", "memory"),
    [
        (Driver([150 * 10**9, 85 * 10**9]), 85 * 10**9),
        (Driver([]), None),
        (Driver([80], cuInit=100), None),
        (Driver([80], cuDeviceGetCount=3), None),
        (None, None),
    ],
)
def test_the_smallest_gpu_counts(driver: Driver | None, memory: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, driver)
    assert least_gpu_memory() == memory


def test_a_gpu_that_does_not_tell_its_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Driver([80], cuDeviceTotalMem_v2=101))
    with pytest.raises(RuntimeError, match="memory of GPU 0: its error is 101"):
        least_gpu_memory()
