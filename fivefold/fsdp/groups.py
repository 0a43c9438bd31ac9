"""Process groups of a layout, in the order of ranks of `fivefold.layout.grid`: tensor, context, data parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

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
    shares: DeviceMesh | None
    """The ranks of `shard`, [ranks / n, n]; n neighbours keep gathered weights between the passes; None: each
    rank keeps all of them, or none."""

    @property
    def weights(self) -> ShardGroups:
        """This rank's place in the sharding of the weights before FSDP shards them further; experts split as all do."""
        rank, size = self.tp.rank(), self.tp.size()
        return ShardGroups(
            tp_rank=rank, tp_size=size, tp_group=self.tp, etp_rank=rank, etp_size=size, etp_group=self.tp
        )


_made: list[tuple[dist.ProcessGroup, ParallelLayout, bool | int, Groups]] = []
"""The groups that this process has made, with the world, the layout and the shares that they are of."""


def make_groups(layout: ParallelLayout, timeout_s: float, kept: bool | int = True) -> Groups:
    """Return the groups of `layout`, created by the first call. All processes call this together.

    Args:
        layout: the layout.
        timeout_s: longest time, in seconds, that a collective may wait for another rank.
        kept: what is kept of gathered weights between the passes (`FSDPConfig.reshard_after_forward`).

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
    for _, known, known_kept, groups in _made:
        if (known, known_kept) == (layout, kept):
            return groups

    def make(ranks: list[list[int]]) -> dist.ProcessGroup:
        if len(ranks) == 1:
            return world
        own, _ = dist.new_subgroups_by_enumeration(ranks, timeout=timedelta(seconds=timeout_s))
        assert own is not None
        return own

    def along(*axes: Axis) -> list[list[int]]:
        return [list(members) for members in rank_groups(layout, *axes)]

    shares = None
    if not isinstance(kept, bool):
        grids = [torch.tensor(ranks).view(-1, kept) for ranks in along("cp", "dp")]
        apart = make([ranks for grid in grids for ranks in grid.T.tolist()])
        near = make([ranks for grid in grids for ranks in grid.tolist()])
        own = next(grid for grid in grids if dist.get_rank() in grid)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        shares = DeviceMesh.from_group([apart, near], device, own, mesh_dim_names=("apart", "near"))
    groups = Groups(
        tp=make(along("tp")), cp=make(along("cp")), dp=make(along("dp")), shard=make(along("cp", "dp")), shares=shares
    )
    _made.append((world, layout, kept, groups))
    return groups
