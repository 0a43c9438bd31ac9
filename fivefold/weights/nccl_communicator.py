"""NCCL communicators between processes that share no group of torch.distributed, through NCCL's C interface.

torch has bindings in `torch.cuda.nccl`, but `init_rank` there fails with "SystemError: PY_SSIZE_T_CLEAN
macro must be defined for '#' formats" (torch 2.11, Python 3.12). Once a release of torch fixes it, this file can go.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

ID_BYTES = 128
"""Bytes of NCCL's id of a group (`NCCL_UNIQUE_ID_BYTES`)."""
_SUCCESS = 0
_UINT8, _FLOAT32 = 1, 7
"""Values of `ncclDataType_t`."""
_SUM = 0
"""Value of `ncclRedOp_t`."""


class ncclUniqueId(ctypes.Structure):
    """NCCL's id of a group."""

    _fields_: ClassVar = [("internal", ctypes.c_byte * ID_BYTES)]


def new_unique_id() -> bytes:
    """Return the id of a new group. The process that asks for it must stay until all have entered.

    Raises:
        RuntimeError: this process has no NCCL library, or NCCL failed.
    """
    unique_id = ncclUniqueId()
    _call("ncclGetUniqueId", ctypes.byref(unique_id))
    return bytes(unique_id)


class NcclCommunicator:
    """This process's end of a group, on the current CUDA device."""

    def __init__(self, unique_id: bytes, world_size: int, rank: int) -> None:
        """Enter the group; return once all its processes have.

        Args:
            unique_id: the group's id, from `new_unique_id` in one of the processes.
            world_size: number of processes.
            rank: the number of this one.

        Raises:
            RuntimeError: NCCL failed.
        """
        self._communicator = ctypes.c_void_p()
        torch.cuda.current_stream()  # initialises CUDA in this process and selects its device
        _call(
            "ncclCommInitRank",
            ctypes.byref(self._communicator),
            ctypes.c_int(world_size),
            ncclUniqueId.from_buffer_copy(unique_id),
            ctypes.c_int(rank),
        )

    def broadcast(self, flat: Tensor, source: int) -> None:
        """Send a contiguous tensor of the process `source` to all others, on the current stream.

        Raises:
            RuntimeError: NCCL failed.
        """
        pointer, n_bytes = ctypes.c_void_p(flat.data_ptr()), ctypes.c_size_t(flat.numel() * flat.element_size())
        _call("ncclBroadcast", pointer, pointer, n_bytes, _UINT8, ctypes.c_int(source), self._communicator, _stream())

    def abort(self) -> None:
        """Leave the group, whose other processes may have died.

        Raises:
            RuntimeError: NCCL failed.
        """
        _call("ncclCommAbort", self._communicator)

    def sum(self, values: Tensor) -> None:
        """Add up a contiguous float32 tensor over all processes, in place and on the current stream.

        Raises:
            RuntimeError: NCCL failed.
        """
        pointer, count = ctypes.c_void_p(values.data_ptr()), ctypes.c_size_t(values.numel())
        _call("ncclAllReduce", pointer, pointer, count, _FLOAT32, _SUM, self._communicator, _stream())


def _stream() -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


def _call(name: str, *arguments: Any) -> None:
    result = getattr(_library(), name)(*arguments)
    if result != _SUCCESS:
        raise RuntimeError(f"{name} failed: {_library().ncclGetErrorString(result).decode()} (NCCL error {result})")


@cache
def _library() -> ctypes.CDLL:
    """Return the NCCL library that torch has loaded.

    Raises:
        RuntimeError: there is none.
    """
    try:
        library = ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise RuntimeError(
            f"weights cannot travel by NCCL, because this process finds no NCCL library ({error}): install the package "
            "nvidia-nccl that belongs to torch, or set rollout.weight_transport=folder"
        ) from error
    library.ncclGetErrorString.restype = ctypes.c_char_p
    library.ncclGetErrorString.argtypes = [ctypes.c_int]
    return library
