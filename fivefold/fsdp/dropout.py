"""The random numbers with which adapters drop inputs: a layer that is computed again gets the same ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor

from fivefold.engine.adapters import Switch
from fivefold.engine.dropout import Dropout
from fivefold.engine.state.training_state import TorchGenerators
from fivefold.fsdp.groups import Groups


class Streams:
    """The states of the streams of random numbers (`engine.dropout`)."""

    def __init__(self) -> None:
        """Begin without streams."""
        self._states: dict[str, Tensor] = {}

    def switch(self, rate: float, seed: int, groups: Groups) -> Switch:
        """Begin the streams, and return the switch of adapters whose inputs they drop.

        Args:
            rate: probability by which an input is dropped.
            seed: seed of the streams.
            groups: the groups of this process.
        """
        return Switch(Dropout(rate, seed, {"rank": None, "tensor": groups.tp}, self))

    def get_states(self) -> dict[str, Tensor]:
        """Return the states of all streams in a new dictionary."""
        return dict(self._states)

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Replace the states of all streams."""
        self._states = states

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the contexts of a layer's first forward pass, which begins now, and of its second."""
        return nullcontext(), self._again(self.get_states())

    @contextmanager
    def _again(self, begun: dict[str, Tensor]) -> Iterator[None]:
        """Draw the numbers after earlier states inside the block, and then continue."""
        latest, self._states = self._states, begun
        try:
            yield
        finally:
            self._states = latest


class StreamGenerators(TorchGenerators):
    """Torch's generators and the streams."""

    def __init__(self, streams: Streams) -> None:
        """Take the streams, which have begun."""
        self._streams = streams

    def states(self) -> dict[str, Tensor]:
        """Return the state of each generator by name, uint8 on the CPU."""
        return super().states() | self._streams.get_states()

    def set_states(self, states: Mapping[str, Tensor]) -> None:
        """Set the generators to states that `states` has returned."""
        super().set_states(states)
        self._streams.set_states({name: states[name] for name in self._streams.get_states()})
