"""The stream of weights that a trainer's engine exports, and the senders that turn it into a transport's items.

Small tensors of one shape come in stacks, so that many of them cost no more steps than a large one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Stack:
    """Some tensors of one shape and dtype, and what an update says about them."""

    names: Sequence[str]
    """The name of each in Hugging Face files."""
    tensors: Tensor
    """[number of names, *shape of each]"""


def alone(name: str, tensor: Tensor) -> Stack:
    """Return the stack of one tensor."""
    return Stack((name,), tensor.unsqueeze(0))


def stacked(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Stack]:
    """Yield each tensor as a stack."""
    for name, tensor in tensors:
        yield alone(name, tensor)


def unstacked(stacks: Iterable[Stack]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of stacks in order, as views."""
    for stack in stacks:
        yield from zip(stack.names, stack.tensors.unbind(), strict=True)


Receiver = Callable[[Iterator[Any], torch.device], Iterator[tuple[str, Tensor]]]
"""An engine's end of a transport: yields the tensors of all items, in order, on a device. It takes an item when the
tensors of the last one are no longer needed, so copy what you keep."""


class Sender(ABC):
    """A trainer rank's end of a transport. All ranks call each method together, because gathering is collective."""

    @abstractmethod
    def items(self, weights: Iterable[Stack]) -> Iterator[Any]:
        """Yield all weights as items; every rank iterates to the end.

        If the transport carries weights, rank 0 alone yields items, and may run ahead of the replicas. Otherwise every
        rank yields its part of each item, and the next is asked for once the replicas have begun to load the last.

        Args:
            weights: all tensors; outlines on `meta` on the ranks that are no `Route.readers`.
        """

    @abstractmethod
    def free(self) -> None:
        """Free the buffers of the items, which all replicas have loaded."""


class CollectiveSender(Sender):
    """A sender of a collective transport: it is in a group with all processes of the engines."""

    @abstractmethod
    def open_link(self, meeting: Any) -> Any:
        """Open a group as the engines' `meeting` asks, on rank 0. Returns what they need to enter it.

        It replaces the group before, which the death of an engine may have left unusable.
        """

    @abstractmethod
    def enter_link(self) -> None:
        """Enter the group, on rank 0, together with the engines."""

    @abstractmethod
    def copy(self, weights: Iterable[Stack]) -> None:
        """Copy all weights to host memory; the trainer may change them then."""

    @abstractmethod
    def next_copied(self) -> Any | None:
        """Return the next item of the copied weights, as `items` yields it, in any thread; None after the last."""
