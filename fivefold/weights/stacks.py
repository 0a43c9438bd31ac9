"""Tensors of one shape that lie behind each other, so that many small ones cost no more steps than a large one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Stack:
    """Some tensors of one shape and dtype."""

    names: Sequence[str]
    tensors: Tensor
    """[number of names, *shape of each]"""


def alone(name: str, tensor: Tensor) -> Stack:
    """Return the stack of one tensor."""
    return Stack((name,), tensor.unsqueeze(0))


def stacked(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Stack]:
    """Yield each tensor as a stack of its own."""
    for name, tensor in tensors:
        yield alone(name, tensor)


def unstacked(stacks: Iterable[Stack]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of stacks, as views of them, in their order."""
    for stack in stacks:
        yield from zip(stack.names, stack.tensors.unbind(), strict=True)
