"""A run's session on its machines: Ray, reserved devices, and the roles' workers, from start to end.

    with Session.open(recipe.scheduler, recipe.cluster, logs, timers) as session:
        groups = session.launch(
            Role("actor", placement["actor"].devices, build_trainer, args=(recipe,), distributed=True),
            Role("rollout", placement["rollout"].devices, "package.module:build_rollout", args=(recipe,)),
        )
        with timers.phase("train"):
            result = groups["actor"].call_first(TrainerWorker.update, loss)

However the block ends, no process of the run is left.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
import ray

from fivefold.cluster.compat import hush
from fivefold.cluster.errors import LostNode, Member, NodesLost
from fivefold.cluster.group import WorkerGroup
from fivefold.cluster.joined_ray import JoinedRay
from fivefold.cluster.local_ray import LocalRay
from fivefold.cluster.machine import check_devices
from fivefold.cluster.nodes import Node, check_shared, reserve
from fivefold.cluster.role import Role
from fivefold.cluster.watch import Cause, Watch
from fivefold.config.schema.machines import ClusterConfig, SchedulerConfig
from fivefold.observe.errors import RunFailed
from fivefold.observe.progress import Progress
from fivefold.observe.timers import PhaseTimers


class Session:
    """The session of one run, which is a context manager."""

    def __init__(
        self,
        nodes: Sequence[Node],
        logs: Path,
        timers: PhaseTimers,
        scheduler: SchedulerConfig,
        its_ray: LocalRay | JoinedRay,
    ) -> None:
        self.nodes = tuple(nodes)
        self.timers = timers
        self.logs = logs
        self.timeout_s = scheduler.timeout_s
        self._scheduler = scheduler
        self._own_ray = None if isinstance(its_ray, JoinedRay) else its_ray
        """The Ray that this run has started; None if it has joined one."""
        if isinstance(its_ray, JoinedRay):
            self._cause: Cause = partial(self._why_nodes_are_lost, its_ray)
        else:
            self._cause = partial(its_ray.failure, timers, logs / "ray")
        self.watch = Watch(timers, on_failure=self.kill, cause=self._cause)
        self.build_seconds: dict[str, float] = {}
        """Seconds that the slowest worker of each role took to load its model or to start its server."""
        self._groups: dict[str, WorkerGroup] = {}
        self._created: dict[str, WorkerGroup] = {}
        """Groups of `_groups` whose objects have not been built."""
        self._seen: set[psutil.Process] = set()
        """Processes of this run's private Ray and their children, listed before any of them was killed."""

    @classmethod
    def open(cls, scheduler: SchedulerConfig, cluster: ClusterConfig, logs: Path, timers: PhaseTimers) -> Self:
        """Start Ray (`scheduler.type=local`) or join it, and reserve the devices that `cluster` asks for.

        Args:
            scheduler: type of Ray, its address and the time limit of phases.
            cluster: number of machines and of GPUs on each.
            logs: folder for `<role>-<rank>.log`, which each worker writes on its own machine.
            timers: timers of the driver, which name the phase of a failure.

        Raises:
            ValueError: the machines or devices that `cluster` asks for are missing, or their software differs.
            RunFailed: Ray did not start.
        """
        check_devices(scheduler, cluster)
        hush()
        is_local = scheduler.type == "local"
        its_ray = None
        try:
            its_ray = (
                LocalRay.start()
                if is_local
                else JoinedRay.join(scheduler.address, require_token=scheduler.require_token)
            )
            with timers.phase("reserving devices"):
                wait_s = 0.0 if is_local else scheduler.wait_s
                nodes = reserve(cluster.n_nodes, cluster.n_gpus_per_node, wait_s, is_local=is_local)
        except BaseException:
            _leave(its_ray, ())
            raise
        return cls(nodes, logs.resolve(), timers, scheduler, its_ray)

    @property
    def gpu_memory(self) -> int | None:
        """Bytes of the smallest GPU of the run; None if it runs on CPUs, or its GPUs have no driver."""
        return min((node.gpu_memory for node in self.nodes if node.gpu_memory is not None), default=None)

    @property
    def host_memory(self) -> int:
        """Bytes of host memory of the run's smallest node."""
        return min(node.host_memory for node in self.nodes)

    def progress(self) -> dict[str, Progress]:
        """Return how far roles are with the calls that the driver waits for, as their first ranks report it."""
        return self.watch.progress()

    def _with_variables(self, role: Role) -> Role:
        """Return a role with the environment variables that the recipe gives it."""
        variables = self._scheduler.variables_of(role.name.partition("-")[0])
        return replace(role, environment={**variables, **role.environment})

    def create(self, *roles: Role) -> None:
        """Start the processes of all roles, which import what they need. `launch` builds their objects later.

        Raises:
            ValueError: a role writes to the run's folder, but one of its nodes does not see the folder.
        """
        self.watch.reopen()
        if self._own_ray is None:
            check_shared(self.logs.parent, [node for node in self.nodes if _writes_on(node, roles)])
        for role in roles:
            group = WorkerGroup(self, self._with_variables(role))
            self._groups[role.name] = self._created[role.name] = group
            group.create()

    def launch(self, *roles: Role) -> dict[str, WorkerGroup]:
        """Start the processes of all roles at the same time, and build their objects. Returns the groups by role.

        Raises:
            ValueError: a role writes to the run's folder, but one of its nodes does not see the folder.
            WorkerError: a process cannot build its object.
        """
        self.create(*(role for role in roles if role.name not in self._created))
        groups = [self._created.pop(role.name) for role in roles]
        for group in groups:
            group.build()
        for group in groups:
            self.build_seconds[group.name] = group.ready()
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
        self._created.clear()

    def close(self) -> None:
        """End the workers, release the devices, and leave Ray, or end it if it is private."""
        self.kill()
        self._groups.clear()
        _leave(self._own_ray, self._seen)

    def _why_nodes_are_lost(self, joined: JoinedRay, failed: Collection[Member]) -> NodesLost | None:
        """Return the loss of nodes that caused `failed` workers to fail; None without one."""
        # Without its head, Ray does not answer for the other nodes.
        is_headless = joined.has_lost_its_head()
        if is_headless:
            hosts = [joined.head]
        elif failed:
            hosts = [node.host for node in joined.lost_nodes(self.nodes)]
        else:
            hosts = []
        if not hosts:
            return None
        members = [member for _, group in sorted(self._groups.items()) for member in group.members]
        lost = [LostNode(host, tuple(member for member in members if member.host == host)) for host in hosts]
        n_left = sum(node.host not in hosts for node in self.nodes)
        return NodesLost(lost, self.timers.current, n_left, joined.head if is_headless else None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # If Ray's servers have ended, its calls fail in the driver with errors that do not name this cause.
        cause = self._cause(()) if isinstance(error, Exception) and not isinstance(error, RunFailed) else None
        self.close()
        if cause is not None:
            raise cause from error


def _writes_on(node: Node, roles: Iterable[Role]) -> bool:
    return any(role.writes_run and node.index in {device.node for device in role.devices} for role in roles)


def _leave(its_ray: LocalRay | JoinedRay | None, seen: Collection[psutil.Process]) -> None:
    """End the private Ray, or disconnect from the joined one, which then ends the workers of this driver."""
    if its_ray is None or isinstance(its_ray, JoinedRay):
        ray.shutdown()
    else:
        its_ray.end(seen)
