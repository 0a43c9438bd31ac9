"""What every transport of weights states about itself, and the route of a run's weights. It needs no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fivefold.layout.backends import BACKENDS
from fivefold.layout.placement import Placement

if TYPE_CHECKING:
    from fivefold.config.schema.train import TrainRecipe
    from fivefold.weights.stream import Receiver, Sender

GATHER_BYTES = 256 * 2**20
"""Bytes of full tensors that a trainer gathers at one time, unless one is larger."""
DEVICE_BYTES = 512 * 2**20
"""Bytes of a buffer that an engine reads on the trainer's device, unless a tensor is larger. Loaders take long for a
tensor, not for a bucket."""


@dataclass(frozen=True)
class Transport(ABC):
    """A way of weights from the ranks of a trainer to the engines of a rollout; a row of `table.TRANSPORTS`."""

    name: ClassVar[str]
    """Its name in `rollout.weight_transport`."""
    title: ClassVar[str]
    """What a run's banner says."""
    measured_with: ClassVar[frozenset[str] | None] = None
    """Engines with which it was measured on GPUs, the only ones for which `auto` picks it; None: any engine."""
    carries_weights: ClassVar[bool] = False
    """Whether its items are the weights, in host memory: then they are a copy, which engines stage while they generate.
    Otherwise an item announces a buffer on the trainer's devices."""
    passes_handles: ClassVar[bool] = False
    """Whether its items are handles with which an engine opens the trainer's memory."""
    is_collective: ClassVar[bool] = False
    """Whether the trainer and all engines move each item together: if one of them dies, none can finish."""

    sends_adapters: ClassVar[bool] = False
    """Whether its items are low-rank adapters alone."""
    serves_adapters: ClassVar[bool] = False
    """Whether a server adds what adapters compute to its own weights'. Otherwise an engine merges adapters into the
    weights of the model's files."""

    def unfit(self, recipe: TrainRecipe) -> Iterator[str]:
        """Yield a line for each thing in a recipe with which it cannot work."""
        yield from ()

    def fitted(self, recipe: TrainRecipe) -> Transport:
        """Return the transport of a recipe with which it can work."""
        return self

    @abstractmethod
    def obstacle(self, placement: Placement) -> str | None:
        """Return why it cannot reach the rollout of a placement; None: it can."""

    @abstractmethod
    def device_bytes(self, largest: int) -> int:
        """Return the bytes of its buffers on a rank that sends.

        Args:
            largest: bytes of the largest tensor.
        """

    @abstractmethod
    def sender(self, route: Route, rank: int, timeout_s: float) -> Sender:
        """Return the end of a trainer's rank, which waits at most `timeout_s` seconds for the engines."""

    @abstractmethod
    def receiver(self) -> Receiver:
        """Return the end of an engine that takes tensors."""

    def merged(self, parts: Sequence[Any]) -> Any:
        """Return the item that the ranks have made, each its part; None: there are no more."""
        return parts[0]

    def readers(self, placement: Placement) -> frozenset[int]:
        """Return the trainer's ranks that send; each needs all weights in full."""
        return frozenset({0})

    def suits(self, engine: str) -> bool:
        """Return whether `auto` may pick it for an engine."""
        return self.measured_with is None or engine in self.measured_with


@dataclass(frozen=True)
class Route:
    """The way of a run's weights."""

    transport: Transport
    dtype: str
    """Dtype in which they travel, as in `torch.<dtype>`; the offsets of routers are float32."""
    checksum: bool
    """Whether what arrives is compared with what was sent."""
    readers: frozenset[int] = frozenset({0})
    """The trainer's ranks that send."""
    n_receivers: int = 0
    """Processes of all engines, if the transport is collective."""
    overlaps_training: bool = False
    """Whether the trainer starts its next step once its weights are copied to host memory, while engines take them."""


def stages_obstacle(placement: Placement) -> str | None:
    """Return why an engine with pipeline stages cannot take weights on GPUs; None: it can."""
    layout = placement["rollout"].layout
    engine = BACKENDS[layout.backend]
    if layout.pp == 1 or engine.loads_stages:
        return None
    return f"{engine.title} takes weights on GPUs without pipeline stages, and the rollout has p{layout.pp}"
