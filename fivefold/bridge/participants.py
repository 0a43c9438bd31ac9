"""What each rank has to do in an export whose tensors only some ranks read.

    reader ──its pipeline: one rank a stage──> holders ──their TP groups──> ranks that take part in dense gathers
                                                       ──their EP groups──> ranks with other experts
                                                                            ──their ETP groups──> and with other parts

Every set is a union of whole process groups, because a collective needs all members of its group. Groups of experts
cross data-parallel replicas, so that a replica without a reader may have to give its experts. All other ranks do
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from fivefold.bridge.groups import ShardGroups


@dataclass(frozen=True)
class Part:
    """What one rank does."""

    reads: bool
    """Whether it reads the full tensors; the others get tensors without content."""
    holds: bool
    """Whether it needs its stage's tensors in full, to read them, or to send them to the reader on another stage."""
    tensor: bool
    """Whether it takes part in gathers over its tensor-parallel group."""
    ep: bool
    """Whether it takes part in gathers over its expert-parallel group."""
    etp: bool
    """Whether it takes part in gathers over its expert-tensor-parallel group."""


ALL = Part(reads=True, holds=True, tensor=True, ep=True, etp=True)
"""The part of each rank if all ranks read."""


@dataclass(frozen=True)
class RankGroups:
    """The ranks of each group that a rank is in, in the default group's numbers."""

    tp: tuple[int, ...]
    ep: tuple[int, ...]
    etp: tuple[int, ...]
    pp: tuple[int, ...]


def find_part(groups: ShardGroups, readers: frozenset[int] | None) -> Part:
    """Return the part of this rank. All ranks call it together.

    Args:
        groups: this rank's place.
        readers: the ranks that read the full tensors; None: all of them.
    """
    if readers is None:
        return ALL
    rank = dist.get_rank()
    own = RankGroups(
        *(
            (rank,) if group is None else tuple(dist.get_process_group_ranks(group))
            for group in (groups.tp_group, groups.ep_group, groups.etp_group, groups.pp_group)
        )
    )
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, own)
    return parts(everywhere, readers)[rank]


def parts(of_ranks: Sequence[RankGroups], readers: frozenset[int]) -> list[Part]:
    """Return the part of each rank, from the groups of each rank.

    Raises:
        ValueError: a reader that is no rank.
    """
    if strangers := readers - set(range(len(of_ranks))):
        raise ValueError(f"ranks {sorted(strangers)} are to read the weights, but there are {len(of_ranks)} ranks")
    holders = _union(of_ranks[rank].pp for rank in readers)
    tensor = _union(of_ranks[rank].tp for rank in holders)
    ep = _union(of_ranks[rank].ep for rank in holders)
    etp = _union(of_ranks[rank].etp for rank in ep)
    return [
        Part(rank in readers, rank in holders, rank in tensor, rank in ep, rank in etp) for rank in range(len(of_ranks))
    ]


def _union(groups: Iterable[tuple[int, ...]]) -> frozenset[int]:
    return frozenset(rank for group in groups for rank in group)
