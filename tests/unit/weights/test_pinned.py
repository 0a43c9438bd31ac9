"""Pinned host memory, over a stand-in for CUDA that notes which bytes it was given."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fivefold.weights import pinned
from fivefold.weights.pinned import host_zeros


class Runtime:
    """Notes what is registered; with `error`, refuses."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.error = 0

    def cudaHostRegister(self, address: int, n_bytes: int, _flags: int) -> int:
        if not self.error:
            self.registered[address] = n_bytes
        return self.error

    def cudaHostUnregister(self, address: int) -> None:
        del self.registered[address]

    def cudaGetErrorString(self, _error: object) -> str:
        return "out of memory"

    def cudaError(self, error: int) -> int:
        return error


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Runtime]:
    runtime = Runtime()
    place = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xA3, pci_device_id=1)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: place)
    monkeypatch.setattr(pinned, "_PCI", tmp_path)
    pinned._cpus_near.cache_clear()
    yield runtime
    gc.collect()
    pinned._cpus_near.cache_clear()


@pytest.mark.parametrize(
    ("told", "wanted"), [("0-3,64-67", {2, 3, 64}), ("64", {64}), ("96-127", {2, 3, 64, 80}), ("", {2, 3, 64, 80})]
)
def test_threads_that_ask_for_pages_are_next_to_the_gpu(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: str, wanted: set[int]
) -> None:
    asked: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 64, 80})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: asked.append(set(cpus)))
    (tmp_path / "0000:a3:01.0").mkdir()
    (tmp_path / "0000:a3:01.0/local_cpulist").write_text(f"{told}\n")
    host_zeros(2**20, torch.uint8, pinned=True)
    assert asked
    assert all(cpus == wanted for cpus in asked)


def test_memory_is_pinned_until_its_last_view_is_gone(runtime: Runtime) -> None:
    tensor = host_zeros(3_000_001, torch.bfloat16, pinned=True)
    assert (tensor.dtype, tensor.shape) == (torch.bfloat16, (3_000_001,))
    assert not tensor.any()
    assert runtime.registered == {tensor.data_ptr(): 6_000_002}
    last, address = tensor[-2:], tensor.data_ptr()
    tensor.fill_(3)
    del tensor
    assert (list(runtime.registered), last.tolist()) == ([address], [3, 3])
    del last
    assert runtime.registered == {}


def test_memory_has_pages_before_it_is_pinned(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    resident: list[int] = []
    monkeypatch.setattr(
        runtime, "cudaHostRegister", lambda address, n_bytes, _: resident.append(_resident(address, n_bytes)) or 0
    )
    monkeypatch.setattr(runtime, "cudaHostUnregister", lambda address: None)
    host_zeros(64 * 2**20, torch.uint8, pinned=True)
    (n_bytes,) = resident
    assert n_bytes >= 64 * 2**20


def _resident(address: int, n_bytes: int) -> int:
    """Return how many of the bytes have memory, which the kernel counts."""
    found = 0
    begin = end = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()
        if "-" in head[0] and not head[0].endswith(":"):
            begin, end = (int(part, 16) for part in head[0].split("-"))
        elif head[0] == "Rss:" and begin < address + n_bytes and address < end:
            found += 1024 * int(head[1])
    return found


def test_a_forked_process_has_none_of_it(runtime: Runtime) -> None:
    tensor = host_zeros(2**20, torch.uint8, pinned=True)
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.write(write, str(_resident(tensor.data_ptr(), 2**20)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 100) == b"0"


def test_memory_that_cannot_be_pinned_is_an_error(runtime: Runtime) -> None:
    runtime.error = 2
    with pytest.raises(RuntimeError, match=r"1,024 bytes of host memory cannot be pinned.*out of memory.*ulimit -l"):
        host_zeros(1024, torch.uint8, pinned=True)
    assert runtime.registered == {}


def test_without_a_gpu_nothing_is_pinned(runtime: Runtime) -> None:
    assert np.array_equal(host_zeros(5, torch.float32, pinned=False).numpy(), np.zeros(5, np.float32))
    assert host_zeros(0, torch.float32, pinned=True).shape == (0,)
    assert runtime.registered == {}
