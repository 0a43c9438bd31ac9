"""A run's session on its machines: Ray, the reserved devices, and the roles' workers, from their start to their end.

    with Session.open(recipe.scheduler, recipe.cluster, logs, timers) as session:
        groups = session.launch(
            Role("actor", placement["actor"].devices, build_trainer, args=(recipe,), distributed=True),
            Role("rollout", placement["rollout"].devices, "package.module:build_rollout", args=(recipe,)),
        )
        with timers.phase("rollout"):
            completions = groups["rollout"].call(RolloutWorker.generate, requests)

However the block ends, it leaves no process of the run.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
import ray

from fivefold.cluster.compat import hush
from fivefold.cluster.errors import RayEnded
from fivefold.cluster.group import WorkerGroup
from fivefold.cluster.local_ray import LocalRay, join
from fivefold.cluster.nodes import Node, reserve
from fivefold.cluster.role import Role
from fivefold.cluster.watch import Watch
from fivefold.config.schema import ClusterConfig, SchedulerConfig
from fivefold.observe.errors import RunFailed
from fivefold.observe.timers import PhaseTimers


class Session:
    """The session of one run, which is a context manager."""

    def __init__(
        self, nodes: Sequence[Node], logs: Path, timers: PhaseTimers, timeout_s: float, own_ray: LocalRay | None
    ) -> None:
        self.nodes = tuple(nodes)
        self.timers = timers
        self.logs = logs
        self.timeout_s = timeout_s
        self.watch = Watch(timers, on_failure=self.kill, cause=self._why_ray_ended)
        self._own_ray = own_ray
        """The Ray that this run has started; None: it has joined one."""
        self._groups: dict[str, WorkerGroup] = {}
        self._seen: set[psutil.Process] = set()
        """Processes of this run's own Ray and all that they have started, listed before any of them was killed."""

    @classmethod
    def open(cls, scheduler: SchedulerConfig, cluster: ClusterConfig, logs: Path, timers: PhaseTimers) -> Self:
        """Start Ray (`scheduler.type=local`) or join it, and reserve the devices that `cluster` asks for.

        Args:
            scheduler: type of Ray, its address and the time limit of phases.
            cluster: number of machines and of GPUs on each.
            logs: folder for `<role>-<rank>.log`; on several machines it must be on a shared file system.
            timers: timers of the driver, which name the phase of a failure.

        Raises:
            ValueError: the machines or devices that `cluster` asks for are missing.
            RunFailed: Ray did not start.
        """
        if scheduler.type == "local" and cluster.n_nodes > 1:
            raise ValueError(
                f"cluster.n_nodes is {cluster.n_nodes}, but scheduler.type=local is this machine alone: "
                "set scheduler.type=ray"
            )
        hush()
        own_ray = None
        try:
            if scheduler.type == "local":
                own_ray = LocalRay.start()
            else:
                join(scheduler.address)
            nodes = reserve(cluster.n_nodes, cluster.n_gpus_per_node)
        except BaseException:
            _leave(own_ray, ())
            raise
        return cls(nodes, logs.resolve(), timers, scheduler.timeout_s, own_ray)

    def launch(self, *roles: Role) -> dict[str, WorkerGroup]:
        """Start the processes of all roles at the same time, and build their objects. Returns the groups by role."""
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
        """End every worker at once, whatever it is doing."""
        self.watch.forget()
        if self._own_ray is not None and self._groups:
            self._seen.update(self._own_ray.processes())
        if self._own_ray is not None and self._own_ray.ended():
            # Without its servers, Ray answers no request to end a worker.
            for process in self._seen:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        for group in self._groups.values():
            group.kill()

    def close(self) -> None:
        """End the workers, release the devices, and leave Ray, or end it if it is this run's own."""
        self.kill()
        self._groups.clear()
        _leave(self._own_ray, self._seen)

    def _why_ray_ended(self) -> RunFailed | None:
        """Return the failure to report if the run's own Ray has ended, with Ray's logs kept beside those of the run."""
        if self._own_ray is None or (ending := self._own_ray.ended()) is None:
            return None
        logs = self.logs / "ray"
        self._own_ray.keep_logs(logs)
        return RayEnded(ending, self.timers.current, logs)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # If Ray's servers have ended, its calls fail in the driver with errors that do not name this cause.
        cause = self._why_ray_ended() if isinstance(error, Exception) and not isinstance(error, RunFailed) else None
        self.close()
        if cause is not None:
            raise cause from error


def _leave(own_ray: LocalRay | None, seen: Collection[psutil.Process]) -> None:
    """End the run's own Ray, or disconnect from the joined one, which then ends the workers of this driver."""
    if own_ray is None:
        ray.shutdown()
    else:
        own_ray.end(seen)
