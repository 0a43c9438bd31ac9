"""Process groups of a layout, in the order of ranks of `fivefold.layout.grid`: tensor, context, data parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from fivefold.bridge.groups import ShardGroups
from fivefold.layout.grid import Axis, rank_groups
from fivefold.layout.parallel import ParallelLayout


@dataclass(frozen=True)
class Groups:
    """The groups of this process."""

    tp: dist.ProcessGroup
    """Ranks that split each layer."""
    cp: dist.ProcessGroup
    """Ranks that share sequences."""
    dp: dist.ProcessGroup
    """Ranks of the same place in each replica."""
    shard: dist.ProcessGroup
    """Ranks that differ in `cp` or `dp`: they hold the same weights, which FSDP shards over them."""

    @property
    def weights(self) -> ShardGroups:
        """This rank's place in the sharding of the weights before FSDP shards them further; experts split as all do."""
        rank, size = self.tp.rank(), self.tp.size()
        return ShardGroups(
            tp_rank=rank, tp_size=size, tp_group=self.tp, etp_rank=rank, etp_size=size, etp_group=self.tp
        )


_made: list[tuple[dist.ProcessGroup, ParallelLayout, Groups]] = []
"""The groups that this process has made, with the world and the layout that they are of."""


def make_groups(layout: ParallelLayout, timeout_s: float) -> Groups:
    """Return the groups of `layout`, created by the first call. All processes call this together.

    Raises:
        ValueError: the number of processes is not the layout's world size.
    """
    world = dist.group.WORLD
    assert world is not None
    if world.size() != layout.world_size:
        raise ValueError(
            f"the layout has {layout.world_size} ranks, but {world.size()} processes were started: "
            "start one process a rank"
        )
    _made[:] = [entry for entry in _made if entry[0] is world]
    for _, known, groups in _made:
        if known == layout:
            return groups

    def make(*axes: Axis) -> dist.ProcessGroup:
        ranks = [list(members) for members in rank_groups(layout, *axes)]
        if len(ranks) == 1:
            return world
        own, _ = dist.new_subgroups_by_enumeration(ranks, timeout=timedelta(seconds=timeout_s))
        assert own is not None
        return own

    groups = Groups(tp=make("tp"), cp=make("cp"), dp=make("dp"), shard=make("cp", "dp"))
    _made.append((world, layout, groups))
    return groups
