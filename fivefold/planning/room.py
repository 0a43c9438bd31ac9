"""The GPUs of a trainer for which a layout is wanted, and the room that roles on the same GPUs leave it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fivefold.config.schema.role import Offloadable
from fivefold.families.shape import ModelShape
from fivefold.layout.backends import BACKENDS
from fivefold.layout.gpus import Gpu
from fivefold.layout.parallel import ParallelLayout
from fivefold.layout.placement import Device
from fivefold.planning.estimate import estimate_alone
from fivefold.planning.estimates import RolloutEstimate
from fivefold.planning.inputs import Inputs, may_leave
from fivefold.planning.memory import RankMemory
from fivefold.planning.model_estimate import estimate_rollout, trainer_memory
from fivefold.planning.problems import HEADROOM
from fivefold.planning.sending import kept_while_sending, may_stream_frozen, sending_bytes
from fivefold.planning.sharing import Sharing
from fivefold.planning.workload import Workload
from fivefold.weights.table import pick
from fivefold.weights.transport import Transport


@dataclass(frozen=True)
class Engine:
    """What an engine needs of each GPU while it generates and a trainer on the same GPUs waits."""

    share: float
    """Share of the GPU's memory that it and the waiting roles may fill."""
    least: int
    """Fewest bytes that it runs with: a server for one sequence, the embedded engine for a batch."""
    others: int
    """Bytes that other roles, except the trainer, have there while it generates."""
    fraction: float | None = None
    """Share of the GPU's memory that a server takes whatever other roles keep; None: it takes what they leave."""
    weights: int = 0
    """Bytes of its weights."""

    @staticmethod
    def of(rollout: RolloutEstimate, fraction: float | None) -> Engine:
        """Return the needs of a rollout whose server takes `fraction` of the memory."""
        memory, layout = rollout.memory, rollout.placed.layout
        share = BACKENDS[layout.backend].memory_share
        least = memory.total - memory.kv_cache + memory.least_cache
        return Engine(share, least, rollout.others, fraction if layout.is_server else None, memory.weights)

    def leaves(self, gpu: Gpu) -> int:
        """Return the bytes that a trainer may keep. Below 0, the engine does not fit even without a trainer."""
        if self.fraction is None:
            return int(gpu.memory * self.share) - self.least - self.others
        if gpu.memory * self.fraction < self.least:
            return -1
        return int(gpu.memory * (1 - self.fraction)) - self.others


@dataclass(frozen=True)
class Cluster:
    """The GPUs of a trainer."""

    gpu: Gpu
    devices: tuple[Device, ...]
    """The device of each rank."""
    reserved: int = 0
    """Bytes of each GPU that other roles keep while the trainer works."""
    engines: tuple[Engine, ...] = ()
    """Engines that generate on the same GPUs."""
    offloadable: tuple[Offloadable, ...] = ()
    """What the trainer may move off its GPUs while they generate."""
    transport: Transport | None = None
    """How its weights go to them; None: there are none."""
    backend: str = "megatron"
    """The trainer's engine. All of its layouts are tried."""
    reference_share: float = 1.0
    """Bytes of a weight of the reference on the trainer's GPUs, over the bytes of a weight of the trainer."""

    @staticmethod
    def whole(gpu: Gpu, n_gpus: int, gpus_per_node: int) -> Cluster:
        """Return GPUs that no other role uses, starting at the first of a node."""
        return Cluster(gpu, tuple(Device(*divmod(index, gpus_per_node)) for index in range(n_gpus)))

    @staticmethod
    def of(inputs: Inputs) -> Cluster:
        """Return the devices of the actor, and the room that roles on the same devices leave it.

        Raises:
            ValueError: roles that do not fit on the cluster or on their lists.
        """
        placement = inputs.place()
        sharers = [placement[role] for role in placement.sharers("actor")]
        rollouts = [placed for placed in sharers if not placed.layout.is_training]
        models = {
            placed.role: estimate_alone(inputs, placement, placed) for placed in sharers if placed.layout.is_training
        }
        sharing = Sharing(inputs, placement, models)
        engines = tuple(
            Engine.of(
                estimate_rollout(inputs, placed, sum(sharing.kept(role, placed.role) for role in models)),
                inputs.generator(placed.role).memory_fraction,
            )
            for placed in rollouts
        )
        actor, reference = placement["actor"], inputs.hosted_reference
        share = 1.0
        if reference is not None:
            is_offloaded = reference.leaves.get("params")
            share = 0.0 if is_offloaded else reference.work.element_bytes / inputs.actor.work.element_bytes
        return Cluster(
            inputs.gpu,
            actor.devices,
            reserved=sharing.others("actor"),
            engines=engines,
            offloadable=may_leave(inputs.actor.leaves),
            transport=pick(inputs.rollout.transport, placement) if engines else None,
            backend=actor.layout.backend,
            reference_share=share,
        )

    @property
    def n_gpus(self) -> int:
        """Number of the trainer's GPUs."""
        return len(self.devices)

    @property
    def most_kept(self) -> int | None:
        """Bytes that the trainer may keep while other roles work on the same GPUs; None if no role does.

        Below 0, the others do not fit even without the trainer.
        """
        return min((engine.leaves(self.gpu) for engine in self.engines), default=None)

    def times(self, count: int) -> Cluster:
        """Return a cluster that is `count` times as large."""
        n_nodes = 1 + max(device.node for device in self.devices)
        copies = range(0, count * n_nodes, n_nodes)
        return replace(
            self, devices=tuple(Device(first + node, local) for first in copies for node, local in self.devices)
        )

    def splits(self, tp: int) -> bool:
        """Return whether tensor parallel groups of `tp` ranks stay inside a node."""
        nodes = [device.node for device in self.devices]
        return all(len(set(nodes[first : first + tp])) == 1 for first in range(0, self.n_gpus, tp))

    def holds(self, memory: Sequence[RankMemory]) -> bool:
        """Return whether a trainer with stages of such `memory` fits, with `HEADROOM` to spare."""
        room = self.gpu.memory * (1 - HEADROOM) - self.reserved
        return all(stage.total <= room and self._may_keep(stage) for stage in memory)

    def _may_keep(self, stage: RankMemory) -> bool:
        if self.most_kept is None:
            return True
        streams = may_stream_frozen([stage], self.offloadable)
        kept = kept_while_sending(stage, self.offloadable, streams_frozen=streams)
        arriving = max(engine.weights for engine in self.engines) + kept
        return stage.kept(self.offloadable) <= self.most_kept and arriving + self.reserved <= self.gpu.memory

    def memory(
        self, layout: ParallelLayout, shape: ModelShape, work: Workload, reference: ModelShape | None
    ) -> Sequence[RankMemory]:
        """Return the memory of each pipeline stage of a trainer, with the buckets for the engines on its GPUs."""
        stages = trainer_memory(layout, shape, work, reference)
        stages = tuple(replace(stage, reference=int(stage.reference * self.reference_share)) for stage in stages)
        if not self.engines or self.transport is None:
            return stages
        sending = sending_bytes(layout, shape, self.transport, element_bytes=work.element_bytes)
        return [replace(stage, sending=sending) for stage in stages]
