"""What a plan estimates: each role, and the whole run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from fivefold.config.schema.role import Offloadable
from fivefold.layout.placement import Placement, RolePlacement
from fivefold.planning.groups import GroupSpread
from fivefold.planning.host_memory import HostMemory
from fivefold.planning.inputs import Inputs
from fivefold.planning.memory import RankMemory
from fivefold.planning.rollout_memory import RolloutMemory
from fivefold.planning.timing import StepTime
from fivefold.planning.workload import Recompute


@dataclass(frozen=True)
class ModelEstimate:
    """A role that trains or scores."""

    placed: RolePlacement
    memory: tuple[RankMemory, ...]
    """Memory of a rank of each pipeline stage."""
    time: StepTime | None
    """Time of an optimizer step; None for a frozen model, whose time is not counted."""
    spreads: tuple[GroupSpread, ...]
    modes: Mapping[Recompute, RankMemory]
    """Memory of the largest stage by recompute mode; empty for a frozen model."""
    others: int = 0
    """Bytes that other roles keep on the same GPUs while this one works."""
    offloaded: tuple[Offloadable, ...] = ()
    """What leaves the GPUs while the role waits. What the actor offloads for a rollout is `Estimate.offloaded`."""

    @property
    def binding(self) -> RankMemory:
        """Memory of the largest stage."""
        return largest(self.memory)

    @property
    def binding_rank(self) -> int:
        """The first rank of the largest stage."""
        return self.binding.stage * (self.placed.layout.world_size // self.placed.layout.pp)

    def kept(self, offloaded: Collection[Offloadable]) -> int:
        """Return the bytes that the role keeps on a GPU while it waits and `offloaded` has left."""
        return max(stage.kept(offloaded) for stage in self.memory)


@dataclass(frozen=True)
class RolloutEstimate:
    """A role that generates."""

    placed: RolePlacement
    memory: RolloutMemory
    spreads: tuple[GroupSpread, ...]
    others: int
    """Bytes that other roles keep on the same GPUs while this one works."""
    arriving: int = 0
    """Bytes of all roles on a GPU while new weights arrive, before there is a cache."""


@dataclass(frozen=True)
class Estimate:
    """A whole run."""

    inputs: Inputs
    placement: Placement
    models: tuple[ModelEstimate, ...]
    rollouts: tuple[RolloutEstimate, ...]
    offloaded: tuple[Offloadable, ...]
    """What the actor moves off its GPUs while a rollout generates there."""
    copies_state: bool
    """Whether checkpoints are written from a copy of the state in host memory while training continues."""
    host_memory: Mapping[int, HostMemory]
    """Host memory that the roles need, by node."""
    problems: tuple[str, ...] = ()
    """Reasons why it cannot run, one per line."""
    streams_frozen: bool = False
    """Whether weights that the actor does not train go to the rollout from host memory."""
    notes: tuple[str, ...] = ()
    """What is wasteful or uncertain though it runs, one per line."""

    @property
    def fits(self) -> bool:
        """Whether nothing keeps the run from starting."""
        return not self.problems


def largest(stages: Iterable[RankMemory]) -> RankMemory:
    """Return the memory of the largest stage."""
    return max(stages, key=lambda stage: stage.total)


def gb(size: float) -> str:
    """Return bytes as GB (1e9), for texts."""
    return f"{size / 1e9:.1f}"
