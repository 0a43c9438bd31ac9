"""The place of a rank in the sharding of the weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class ShardGroups:
    """Rank, size and process group along each dimension that shards or splits the weights.

    A group may be None where its size is 1. Group ranks follow the dimension's ranks: group rank i of `pp_group`
    is pipeline stage i. Data and context parallelism replicate the weights and do not appear here. The defaults
    describe a run with one process.
    """

    tp_rank: int = 0
    tp_size: int = 1
    tp_group: dist.ProcessGroup | None = None
    etp_rank: int = 0
    etp_size: int = 1
    etp_group: dist.ProcessGroup | None = None
    ep_rank: int = 0
    ep_size: int = 1
    ep_group: dist.ProcessGroup | None = None
    pp_rank: int = 0
    pp_size: int = 1
    pp_group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        for name, rank, size, group in (
            ("tp", self.tp_rank, self.tp_size, self.tp_group),
            ("etp", self.etp_rank, self.etp_size, self.etp_group),
            ("ep", self.ep_rank, self.ep_size, self.ep_group),
            ("pp", self.pp_rank, self.pp_size, self.pp_group),
        ):
            if not 0 <= rank < size:
                raise ValueError(f"{name}_rank={rank} is outside {name}_size={size}: ranks run from 0 to size - 1")
            if size > 1 and group is None:
                raise ValueError(f"{name}_size={size} needs a process group, but {name}_group is None")
