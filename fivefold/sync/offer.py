"""What the actor offers and the rollout takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class WeightOffer:
    """All weights of one version. They are gathered as they are taken, so an offer is taken once, and to its end."""

    version: int
    """Training steps that the weights have seen."""
    buckets: Iterator[Any]
    """References to `Bucket`s in the object store, in order."""
