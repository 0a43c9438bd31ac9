"""What a trainer may move off its GPUs while other roles generate there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fivefold.planning.memory import KINDS, Kind


@dataclass(frozen=True)
class OffloadChoice:
    """What the recipe says about each kind; None leaves it to the plan."""

    params: bool | None = None
    grads: bool | None = None
    optimizer: bool | None = None

    @property
    def possible(self) -> tuple[Kind, ...]:
        """The kinds that may be offloaded."""
        return tuple(kind for kind in KINDS if getattr(self, kind) is not False)

    @property
    def asked(self) -> tuple[Kind, ...]:
        """The kinds that are offloaded whatever the plan says."""
        return tuple(kind for kind in KINDS if getattr(self, kind))

    def steps(self) -> Iterator[tuple[Kind, ...]]:
        """Yield what could be offloaded, from the least to the most.

        Gradients cost nothing, because they are only freed, so they always go if the plan may choose.
        """
        chosen = {kind for kind in KINDS if getattr(self, kind)}
        if self.grads is None:
            chosen.add("grads")
        yield tuple(kind for kind in KINDS if kind in chosen)
        for kind in ("optimizer", "params"):
            if getattr(self, kind) is None:
                chosen.add(kind)
                yield tuple(each for each in KINDS if each in chosen)


KEEP_ALL = OffloadChoice(params=False, grads=False, optimizer=False)
"""Nothing may be offloaded."""
