"""Weights that the actor offers to the rollout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class WeightOffer:
    """All weights of one version. They are gathered while they are read, so read an offer once, and to its end."""

    version: int
    """Number of training steps behind the weights."""
    buckets: Iterator[Any]
    """References to `Bucket`s in the object store, in order, or to announcements of `DeviceBucket`s."""
    close: Callable[[], None] = lambda: None
    """Frees the memory of the buckets. Call it once every engine has loaded all of them."""
