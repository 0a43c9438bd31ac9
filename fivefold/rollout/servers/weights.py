"""Weights on their way to a server: in files, or from GPU to GPU by a protocol."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fivefold.weights.device_buckets import Checksum, DeviceBucket
from fivefold.weights.nccl_link import Invitation, Meeting

READY_S = 60.0
"""Seconds that a server has to prepare for weights."""
BUCKET_S = 300.0
"""Seconds that a server has to take a bucket or to enter a group, for which it may wait for other servers."""


@dataclass(frozen=True)
class StagedWeights:
    """Weights in files, which a server can load."""

    version: int
    folder: Path
    """The server's model folder with the weights."""
    sent: Checksum
    """Their checksum, if the route has one."""
    files: ExitStack
    """Removes the folder when it is closed."""


class WeightLoader(Protocol):
    """Hands buckets on the trainer's devices to one server."""

    meeting: Meeting
    """How the server enters an NCCL group."""

    def enter(self, invitation: Invitation, rank_offset: int) -> None:
        """Make the server's processes enter an NCCL group as the ranks from `rank_offset` on; wait until they have.

        Raises:
            ServerHangs: they have not within `BUCKET_S`.
        """

    def load(self, buckets: Iterator[DeviceBucket], version: int, *, is_paused: bool) -> None:
        """Make the server load all buckets, each before the next is taken, and drop what it has cached with others.

        Args:
            buckets: the weights.
            version: their version.
            is_paused: whether the server pauses already. It then still does on return, because it may not have the
                memory of its cache yet.

        Raises:
            ServerHangs: the server did not prepare for weights within `READY_S`, or take a bucket within `BUCKET_S`.
            RuntimeError: the server refused a bucket, or has another version afterwards.
        """


def check_version(said: object, version: int) -> None:
    """Compare the version that a server says it has.

    Raises:
        RuntimeError: it is another one.
    """
    if said != str(version):
        raise RuntimeError(
            f"after an update to version {version} the server says that its weights are version {said!r}"
        )
