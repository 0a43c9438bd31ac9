"""What the adapters of both engines have in common."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from fivefold.engine.dropout import Dropout, Stream


class Switch:
    """Whether the adapters of a model add anything, and whether inputs of theirs are dropped."""

    def __init__(self, dropout: Dropout | None = None) -> None:
        """Begin with adapters that add, and drop nothing.

        Args:
            dropout: what drops inputs in training; None: nothing does.
        """
        self.is_on = True
        self.drops = False
        """Whether inputs are dropped now."""
        self._dropout = dropout

    @contextmanager
    def off(self) -> Iterator[None]:
        """Compute the model without its adapters inside the block."""
        self.is_on = False
        try:
            yield
        finally:
            self.is_on = True

    @contextmanager
    def training(self) -> Iterator[None]:
        """Drop inputs inside the block, which computes gradients."""
        self.drops = self._dropout is not None
        try:
            yield
        finally:
            self.drops = False

    def input(self, x: Tensor, stream: Stream) -> Tensor:
        """Return an adapter's input, with zeros that a stream of random numbers chooses if inputs are dropped now."""
        return self._dropout(x, stream) if self.drops and self._dropout is not None else x
