"""What is computed over a whole mini-batch before its loss, which sees one micro-batch at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from fivefold.batch import Batch

Gather = Callable[[torch.Tensor], list[torch.Tensor]]
"""Takes one tensor of each data-parallel replica, of any length, and returns all of them on each."""


class BatchStep(Protocol):
    """Changes the fields of a mini-batch, which is divided over the replicas."""

    def __call__(self, batch: Batch, gather: Gather) -> Batch:
        """Return `batch`, this replica's share, with changed fields. Every replica calls `gather` as often."""


@dataclass(frozen=True)
class InTurn:
    """Changes of a batch, one after the other."""

    changes: tuple[Callable[[Batch], Batch], ...]

    def __call__(self, batch: Batch) -> Batch:
        for change in self.changes:
            batch = change(batch)
        return batch


@dataclass(frozen=True)
class StepsInTurn:
    """Steps over a mini-batch, one after the other."""

    steps: tuple[BatchStep, ...]

    def __call__(self, batch: Batch, gather: Gather) -> Batch:
        for step in self.steps:
            batch = step(batch, gather)
        return batch
