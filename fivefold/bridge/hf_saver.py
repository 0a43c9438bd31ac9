"""Writes a Hugging Face model folder from all ranks of a model, each its own pieces.

    rank 0: folder, headers ──> every rank: its pieces, to their places ──> rank 0: configs, replaces the target
                             ^                                           ^
                             └── all meet, and fail if one has failed ───┘

Nothing is gathered: a rank has a block of one piece in host memory at a time. Ranks that hold the same pieces share the
writing of them. All ranks must see the folder, so several nodes need storage that they share.
"""

from __future__ import annotations

import errno
import shutil
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor

from fivefold.bridge.groups import ShardGroups
from fivefold.bridge.mapping import Domain
from fivefold.bridge.parameters import Parameter
from fivefold.bridge.pieces import Piece
from fivefold.bridge.shard_files import BLOCK_BYTES, ShardFiles
from fivefold.bridge.shard_plan import ShardPlan
from fivefold.observe.progress import counting

Result = TypeVar("Result")

_REPORTED = 3
"""Most failures of ranks in a message."""


Block = tuple[Piece, Tensor]
"""A rectangle of a Hugging Face tensor and its content, [sizes] in the planned dtype, on any device."""


class NewFolder(Protocol):
    """A folder of weight files that is written next to its final place (`HFFolder`)."""

    plan: ShardPlan
    target: Path

    @property
    def kept_bytes(self) -> int:
        """Bytes of the plan that `begin` writes."""

    def begin(self) -> Path:
        """Return a new folder with weight files that have headers, and of the data only what ranks do not hold."""

    def finish(self, partial: Path) -> None:
        """Add the other files, and put the folder in its place."""


def save_blocks(new: NewFolder, own: Iterable[Block]) -> None:
    """Write a model folder from the blocks of all ranks. The bytes are the same for every layout.

    All ranks of the default process group call this together.

    Args:
        new: the folder, described alike on every rank.
        own: the blocks that this rank writes, of at most `BLOCK_BYTES` unless one row is larger. All ranks' blocks tile
            the model's tensors once.

    Raises:
        OSError: on every rank, naming the rank and the file, if a disk is full or a rank cannot write; an earlier
            folder is then as it was.
        ValueError: on every rank, if the shards are not the planned model's.
    """
    leads = dist.get_rank() == 0
    partial, *_ = _together(new.target, lambda: new.begin() if leads else Path())
    try:
        n_bytes = _together(new.target, lambda: _write_own(partial, new.plan, own))
        wanted = new.plan.data_bytes - new.kept_bytes
        if sum(n_bytes) != wanted:
            raise ValueError(
                f"the ranks hold {sum(n_bytes):,} bytes of weights, and the model has {wanted:,}: the "
                "pieces of the mappings do not tile its tensors"
            )
        _together(new.target, lambda: new.finish(partial) if leads else None)
    finally:
        if leads:
            shutil.rmtree(partial, ignore_errors=True)


def _write_own(partial: Path, plan: ShardPlan, own: Iterable[Block]) -> int:
    """Write this rank's blocks, and wait until they are on the disk. Returns their bytes."""
    n_bytes = 0
    try:
        # Ranks write about the same amounts, which blocks are this one's is known only as they come.
        share = plan.data_bytes // dist.get_world_size()
        with ShardFiles(partial, plan) as files, counting("saving weights", share) as count:
            for block, content in own:
                row, *columns = block.offsets
                written = files.write(block.name, content, row, sum(columns))
                n_bytes += written
                count(written)
            files.sync()
    except FileNotFoundError as error:
        raise FileNotFoundError(
            error.errno,
            "rank 0 has made this file, and it is not there for this rank: nodes that write one model need storage "
            "that they share",
            error.filename,
        ) from error
    return n_bytes


@dataclass(frozen=True)
class _Turn:
    """The place of a rank among those that hold the same shards, which take turns at writing blocks."""

    own: int
    n_ranks: int


def _turns(groups: ShardGroups) -> dict[Domain, _Turn]:
    """Return this rank's turn in each domain. All ranks call this together."""
    tensor, expert = (groups.pp_rank, groups.tp_rank), (groups.pp_rank, groups.ep_rank, groups.etp_rank)
    # Replicated parameters are stored by the first tensor-parallel rank, so they take the turns of the others.
    places: dict[Domain, tuple[int, ...]] = {"replicated": tensor, "tensor": tensor, "expert": expert}
    everywhere: list[dict[Domain, tuple[int, ...]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everywhere, places)
    turns = {}
    for domain, place in places.items():
        same = [rank for rank, others in enumerate(everywhere) if others[domain] == place]
        turns[domain] = _Turn(same.index(dist.get_rank()), len(same))
    return turns


def shared_blocks(parameters: Iterable[Parameter], groups: ShardGroups) -> Iterator[Block]:
    """Return the blocks that this rank writes of shards that several ranks may hold, which take turns.

    All ranks of the default process group call this together.

    Args:
        parameters: this rank's parameters, contiguous, in the planned dtype.
        groups: this rank's place.
    """
    return _own_blocks(parameters, groups, _turns(groups))


def _own_blocks(parameters: Iterable[Parameter], groups: ShardGroups, turns: Mapping[Domain, _Turn]) -> Iterator[Block]:
    counts: Counter[Domain] = Counter()
    for parameter in parameters:
        mapping, shard = parameter.mapping, parameter.tensor.detach()
        turn = turns[mapping.domain]
        for piece in mapping.stored_pieces(groups):
            for block in blocks(piece, shard.element_size()):
                if counts[mapping.domain] % turn.n_ranks == turn.own:
                    yield block, block.view(shard)
                counts[mapping.domain] += 1


def blocks(piece: Piece, itemsize: int) -> Iterator[Piece]:
    """Yield a piece in parts of whole rows, of at most `BLOCK_BYTES` unless one row is larger."""
    row = prod(piece.sizes[1:])
    step = max(1, BLOCK_BYTES // (row * itemsize)) * row
    for begin in range(piece.start, piece.end, step):
        yield from piece.within(begin, begin + step)


@dataclass(frozen=True)
class _Outcome:
    """What a rank did."""

    node: str
    value: Any
    error: OSError | ValueError | None


def _together(target: Path, action: Callable[[], Result]) -> list[Result]:
    """Call `action` on every rank, wait for all, and return all results, by rank. Errors name the `target`.

    Raises:
        OSError: on every rank, if it raised one on some rank.
        ValueError: likewise.
    """
    error: OSError | ValueError | None = None
    value: Result | None = None
    try:
        value = action()
    except (OSError, ValueError) as raised:
        error = raised
    outcomes: list[_Outcome | None] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, _Outcome(socket.gethostname(), value, error))
    known = [outcome for outcome in outcomes if outcome is not None]
    failed = {rank: outcome for rank, outcome in enumerate(known) if outcome.error is not None}
    if failed:
        raise _failure(target, failed) from error
    return [outcome.value for outcome in known]


def _failure(target: Path, failed: dict[int, _Outcome]) -> OSError | ValueError:
    """Return the error that tells every rank what failed on which."""
    told = [f"rank {rank} on {outcome.node}: {outcome.error}" for rank, outcome in failed.items()]
    more = f", and {len(told) - _REPORTED} more ranks" if len(told) > _REPORTED else ""
    message = f"the model was not written to {target}: {'; '.join(told[:_REPORTED])}{more}"
    system = [outcome.error.errno for outcome in failed.values() if isinstance(outcome.error, OSError)]
    return OSError(system[0] or errno.EIO, message) if system else ValueError(message)
