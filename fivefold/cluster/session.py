"""One run's hold on its machines: Ray, the reserved devices, the roles' workers, and the end of them all.

    with Session.open(recipe.scheduler, recipe.cluster, logs, timers) as session:
        groups = session.launch(
            Role("actor", placement["actor"].devices, build_trainer, args=(recipe,), distributed=True),
            Role("rollout", placement["rollout"].devices, "package.module:build_rollout", args=(recipe,)),
        )
        with timers.phase("rollout"):
            completions = groups["rollout"].call(RolloutWorker.generate, requests)

However the block is left, no process of the run is left behind.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import ray

from fivefold.cluster import local_ray
from fivefold.cluster.group import WorkerGroup
from fivefold.cluster.nodes import Node, reserve
from fivefold.cluster.watch import Watch
from fivefold.cluster.worker import Build
from fivefold.config.schema import ClusterConfig, SchedulerConfig
from fivefold.layout.placement import Device
from fivefold.observe.timers import PhaseTimers


@dataclass(frozen=True)
class Role:
    """What runs in each process of a role."""

    name: str
    devices: Sequence[Device]
    """Where each rank runs, rank 0 first (`Placement[role].devices`). Roles may share devices."""
    build: Build
    """Makes the object that a worker holds, called as `build(*args)` in the worker process."""
    args: tuple[Any, ...] = ()
    distributed: bool = False
    """Whether the ranks meet in torch.distributed: MASTER_ADDR and MASTER_PORT are set for `init_method="env://"`."""
    threads: int | None = None
    """OMP_NUM_THREADS; none: the driver's, or the node's cores shared among the role's processes on it."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables of the processes, set before anything heavy is imported."""
    devices_per_process: int = 1
    """How many of `devices`, which then lie on one node, each process has."""

    def processes(self) -> list[Sequence[Device]]:
        """The devices of each process."""
        n = self.devices_per_process
        return [self.devices[first : first + n] for first in range(0, len(self.devices), n)]


class Session:
    """Opened once a run; use it as a context manager."""

    def __init__(
        self, nodes: Sequence[Node], logs: Path, timers: PhaseTimers, timeout_s: float, folder: Path | None
    ) -> None:
        self.nodes = tuple(nodes)
        self.timers = timers
        self.logs = logs
        self.timeout_s = timeout_s
        self.watch = Watch(timers, on_failure=self.kill)
        self._folder = folder
        self._groups: dict[str, WorkerGroup] = {}
        self._seen: set[psutil.Process] = set()
        """Processes of this run's own Ray, and whatever they have started, as they were before anything was killed."""

    @classmethod
    def open(cls, scheduler: SchedulerConfig, cluster: ClusterConfig, logs: Path, timers: PhaseTimers) -> Self:
        """Starts Ray (`scheduler.type=local`) or joins it, and reserves the devices that `cluster` asks for.

        Args:
            logs: folder for `<role>-<rank>.log`; on several machines it must be on a shared file system.

        Raises:
            ValueError: the machines or devices asked for are not there.
        """
        if scheduler.type == "local" and cluster.n_nodes > 1:
            raise ValueError(
                f"cluster.n_nodes is {cluster.n_nodes}, but scheduler.type=local is this machine alone: "
                "set scheduler.type=ray"
            )
        local_ray.hush()
        folder = None
        try:
            if scheduler.type == "local":
                folder = local_ray.start()
            else:
                local_ray.join(scheduler.address)
            nodes = reserve(cluster.n_nodes, cluster.n_gpus_per_node)
        except BaseException:
            _leave_ray(folder)
            raise
        return cls(nodes, logs.resolve(), timers, scheduler.timeout_s, folder)

    def launch(self, *roles: Role) -> dict[str, WorkerGroup]:
        """Starts the processes of all roles side by side and builds what they hold; by role name."""
        self.watch.reopen()
        groups = [WorkerGroup(self, role) for role in roles]
        self._groups.update({group.name: group for group in groups})
        for group in groups:
            group.create()
        for group in groups:
            group.build()
        for group in groups:
            group.ready()
        return {group.name: group for group in groups}

    def kill(self) -> None:
        """Ends every worker at once, in the middle of whatever it does."""
        self.watch.forget()
        if self._folder is not None and self._groups:
            self._seen.update(local_ray.processes(self._folder))
        for group in self._groups.values():
            group.kill()

    def close(self) -> None:
        """Ends the workers, gives the devices back and leaves Ray, or ends it if it is this run's own."""
        self.kill()
        self._groups.clear()
        _leave_ray(self._folder, self._seen)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _leave_ray(folder: Path | None, seen: Collection[psutil.Process] = ()) -> None:
    """Ends the Ray in `folder`, or disconnects from the one that was joined: it ends what this driver has there."""
    if folder is None:
        ray.shutdown()
    else:
        local_ray.end(folder, seen)
