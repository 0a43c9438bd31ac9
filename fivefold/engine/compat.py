"""A patch of torch.distributed, with its symptom, its cause and the condition for its removal."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import cache
from typing import Any

from torch.distributed.distributed_c10d import ProcessGroupGloo, Store


@cache
def share_gloo_devices() -> None:
    """Let all gloo process groups that this process makes from now on share one thread that waits for messages.

    Symptom: a process with 30 groups needs three hundredths of a core while it does nothing.
    Cause: each group has a gloo device, whose thread wakes up a hundred times a second.
    Remove when: torch.distributed makes one device for all groups of a process.
    """
    make = ProcessGroupGloo.__init__

    def make_on_shared(group: ProcessGroupGloo, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices, options._timeout = _devices(), timeout
        options._threads = 2 * len(options._devices)  # as many as torch.distributed gives a group
        make(group, store, rank, size, options)

    ProcessGroupGloo.__init__ = make_on_shared  # type: ignore[assignment, method-assign]


@cache
def _devices() -> list[Any]:
    """Return the devices of this process: the interfaces in GLOO_SOCKET_IFNAME, or the interface of the host's name."""
    names = os.environ.get("GLOO_SOCKET_IFNAME")
    if not names:
        return [ProcessGroupGloo.create_default_device()]
    return [ProcessGroupGloo.create_device(interface=name) for name in names.split(",")]
