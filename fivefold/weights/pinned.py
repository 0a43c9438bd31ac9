"""Large tensors in pinned host memory, which a GPU reads and writes at the speed of its link.

PyTorch's own pinned memory comes page by page from one thread, at 1.4 to 2 GB/s on a machine with an H200, and is
rounded up to a power of two. This memory is in huge pages, which several threads ask for at once, on CPUs next to the
GPU: the kernel then takes memory that the GPU reaches without crossing to another socket.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

_THREADS = 8
"""Most threads that ask for pages at once."""
_PCI = Path("/sys/bus/pci/devices")
"""Where the kernel tells which CPUs are next to a device."""


def host_zeros(size: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """Return zeros in host memory, [size], which are pinned for as long as the tensor or a view of it lives.

    Args:
        size: number of elements.
        dtype: dtype of the elements.
        pinned: whether the memory is pinned, which needs a CUDA device.

    Raises:
        RuntimeError: the memory cannot be pinned.
    """
    if not pinned or not size:
        return torch.zeros(size, dtype=dtype)
    return torch.frombuffer(_Pinned(size * dtype.itemsize), dtype=dtype)


class _Pinned(mmap.mmap):
    """Pinned bytes, all of them zero."""

    _address: int | None = None
    """Where they are, once CUDA knows them."""

    def __new__(cls, n_bytes: int) -> _Pinned:
        memory = super().__new__(cls, -1, n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A process that is forked would get copies of pages which the GPU writes.
        memory.madvise(mmap.MADV_DONTFORK)
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a kernel without huge pages
                raise
        memory._hand_out()
        memory._register()
        return memory

    def _hand_out(self) -> None:
        """Write to every page, for which the kernel then has memory."""
        cpus = _cpus_near(torch.cuda.current_device())
        threads = min(_THREADS, len(cpus))
        first_bytes = np.frombuffer(self, np.uint8)[:: mmap.PAGESIZE]
        with ThreadPoolExecutor(threads, initializer=partial(os.sched_setaffinity, 0, cpus)) as pool:
            list(pool.map(lambda part: part.fill(0), np.array_split(first_bytes, threads)))

    def _register(self) -> None:
        runtime, address = torch.cuda.cudart(), torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        if error := int(runtime.cudaHostRegister(address, len(self), 0)):
            raise RuntimeError(
                f"{len(self):,} bytes of host memory cannot be pinned, CUDA says "
                f"{runtime.cudaGetErrorString(runtime.cudaError(error))}: raise the limit of locked memory "
                "(ulimit -l), or spread the state over more ranks"
            )
        self._address = address

    def __del__(self) -> None:
        # At the end of the process, CUDA releases the memory by itself.
        if self._address is not None and not sys.is_finalizing():
            torch.cuda.cudart().cudaHostUnregister(self._address)


@cache
def _cpus_near(gpu: int) -> frozenset[int]:
    """Return the CPUs of this process that are next to a GPU; all of them if the kernel does not tell."""
    own = frozenset(os.sched_getaffinity(0))
    place: Any = torch.cuda.get_device_properties(gpu)  # torch's stubs lack where it is
    file = _PCI / f"{place.pci_domain_id:04x}:{place.pci_bus_id:02x}:{place.pci_device_id:02x}.0" / "local_cpulist"
    if not file.exists():
        return own
    near: set[int] = set()
    for part in filter(None, file.read_text().strip().split(",")):
        first, _, last = part.partition("-")
        near.update(range(int(first), int(last or first) + 1))
    return own & near or own
