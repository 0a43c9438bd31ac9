"""A role: what runs in its processes, and on which devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fivefold.layout.placement import Device

Build = str | Callable[..., Any]
"""What makes the object that a worker holds: `module:function`, or a callable that cloudpickle can carry."""


@dataclass(frozen=True)
class Role:
    """A role: its devices, and the object that each of its processes holds."""

    name: str
    devices: Sequence[Device]
    """Devices of the processes, rank 0 first (`Placement[role].devices`). Roles may share devices."""
    build: Build
    """Makes the object that a worker holds, called as `build(*args)` in the worker process."""
    args: tuple[Any, ...] = ()
    distributed: bool = False
    """Whether the ranks meet in torch.distributed: MASTER_ADDR and MASTER_PORT are set for `init_method="env://"`."""
    threads: int | None = None
    """OMP_NUM_THREADS; None: the driver's, or what each process's share of the node's cores gives."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables of the processes, set before anything heavy is imported."""
    writes_run: bool = False
    """Whether the processes write to the run's folder, so that their nodes must share it with the driver's."""
    devices_per_process: int = 1
    """Number of `devices` that each process has, all of them on one node."""

    def processes(self) -> list[Sequence[Device]]:
        """Return the devices of each process."""
        n = self.devices_per_process
        return [self.devices[first : first + n] for first in range(0, len(self.devices), n)]
