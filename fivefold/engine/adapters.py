"""What the adapters of both engines have in common."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Switch:
    """Whether the adapters of a model add anything."""

    def __init__(self) -> None:
        self.is_on = True

    @contextmanager
    def off(self) -> Iterator[None]:
        """Compute the model without its adapters inside the block."""
        self.is_on = False
        try:
            yield
        finally:
            self.is_on = True
