"""CUDA IPC: a process opens the memory that another process has on the same GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing import reductions

from fivefold.weights.device_buckets import Handle

_DEVICE_INDEX = 6
"""Place of the device's index among the arguments of `rebuild_cuda_tensor`."""
_COUNTER, _OFFSET = 11, 12
"""Places of the file with the count of a handle's users, and of the count in it."""
_HEADER_BYTES = 64
"""Bytes before the counts, which torch keeps for itself."""
SHARED_MEMORY = Path("/dev/shm")


def device_uuid(device: torch.device) -> str:
    """Return the UUID of a CUDA device, by which all processes know it."""
    return str(torch.cuda.get_device_properties(device).uuid)


def visible_uuids() -> list[str]:
    """Return the UUIDs of this process's devices. Another process asks, because the question costs device memory."""
    question = (
        "import torch; [print(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]"
    )
    answer = subprocess.run([sys.executable, "-c", question], check=True, stdout=subprocess.PIPE, text=True)
    return answer.stdout.split()


def exported(buffer: Tensor) -> Handle:
    """Return a handle of a CUDA tensor, for one process to open once; what was written to it is there by then.

    CUDA frees exported memory only when each handle was opened and released, so that each bucket needs a new one.
    """
    torch.cuda.current_stream(buffer.device).synchronize()
    _, handle = reductions.reduce_tensor(buffer)
    return tuple(handle)


def opened(handle: Handle, device: torch.device) -> Tensor:
    """Return the tensor of a handle; `device` is the name that its device has in this process."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return reductions.rebuild_cuda_tensor(*on_device(handle, index))


def on_device(handle: Handle, device: int | str) -> Handle:
    """Return a handle whose device is called `device`, as the process that opens it calls it."""
    return (*handle[:_DEVICE_INDEX], device, *handle[_DEVICE_INDEX + 1 :])


def release(handles: Iterable[Handle]) -> None:
    """Release handles in place of a process that has died, but those that it had released itself.

    The exporter frees memory whose count of users is zero. One that is released twice would keep it for ever, because
    the count has no sign.
    """
    for handle in handles:
        if _is_used(handle):
            UntypedStorage._release_ipc_counter(handle[_COUNTER], handle[_OFFSET], device="cuda")


def _is_used(handle: Handle) -> bool:
    """Return whether the count of a handle's users is above zero; it is so from the beginning, until it is released."""
    file = SHARED_MEMORY / handle[_COUNTER].decode().lstrip("/")
    if not file.exists():  # all of its memory is free, or it is on another node
        return False
    counts = np.fromfile(file, np.int64, offset=_HEADER_BYTES)
    return bool(counts[handle[_OFFSET]] > 0)


def collect() -> None:
    """Free the exported memory that all processes have released."""
    torch.cuda.ipc_collect()
