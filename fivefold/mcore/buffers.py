"""The buffers in which Megatron-Core's DDP lays out trained weights and their gradients.

A parameter that is not trained has its own memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from fivefold.bridge.parameters import Parameter
from fivefold.engine.contract import Offloadable
from fivefold.engine.state.parkable import Parkable


def free_weights(parameters: Iterable[Parameter]) -> None:
    """Give the memory of weights without values back where Megatron's DDP allocates it again: of those it trains."""
    for parameter in parameters:
        # One element that looks like a whole tensor, from which DDP can copy.
        parameter.tensor.data = parameter.tensor.data.new_zeros(()).expand(parameter.tensor.shape)


class ChunkBuffers:
    """The memory of the weights and gradients of a model's chunks on this rank."""

    def __init__(self, chunks: Sequence[Any], parameters: Iterable[Parameter]) -> None:
        """Find the memory.

        Args:
            chunks: the model's chunks, each inside Megatron's DDP if the model is trained.
            parameters: the parameters of all chunks. DDP has those that gradients change.
        """
        self._chunks = [chunk for chunk in chunks if isinstance(chunk, DistributedDataParallel)]
        self.buffers: list[Any] = [
            buffer for chunk in self._chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ]
        """DDP's buffers, each with the data of several parameters and of their gradients."""
        self._trained = [Parkable(buffer.param_data) for buffer in self.buffers]
        # A model without an optimizer may follow another one, and then changes.
        self._apart = {
            each.name: Parkable(each.tensor.data, is_constant=bool(self._chunks))
            for each in parameters
            if not each.has_gradient and not each.mapping.keeps_float32
        }
        self._parkable: dict[Offloadable, list[Parkable]] = {
            "params": [*self._trained, *self._apart.values()],
            "grads": [Parkable(buffer.grad_data) for buffer in self.buffers],
        }
        self.has_frozen = bool(self._chunks and self._apart)
        """Whether the model is trained, but some of its weights are not."""
        self.has_gradients = False
        """Whether the buffers have the gradient of an earlier mini-batch, reduced over the ranks."""

    def set_gradients_aside(self) -> list[Tensor]:
        """Clear the gradient of earlier mini-batches, and return it.

        It is already summed over the ranks, and would be summed a second time if it stayed in the buffers.
        """
        earlier = [buffer.grad_data.clone() for buffer in self.buffers]
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        return earlier

    def add_gradients(self, earlier: Sequence[Tensor]) -> None:
        """Add what `set_gradients_aside` has returned."""
        for buffer, gradients in zip(self.buffers, earlier, strict=True):
            buffer.grad_data += gradients

    def park(self, what: Collection[Offloadable]) -> int:
        """Give device memory back: parameters are copied to the host, gradients are lost. Returns the freed bytes."""
        if "grads" in what:
            self._forget_gradients()
        return sum(
            tensor.park(keep_values=kind == "params") for kind in what for tensor in self._parkable.get(kind, ())
        )

    def _forget_gradients(self) -> None:
        """Let the next mini-batch be the first since the last update."""
        self.has_gradients = False
        for chunk in self._chunks:
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                # Which gradients are there: overlapped sums begin when all are, counted from the last reset.
                group.reset()

    def fetch(self, what: Collection[Offloadable]) -> int:
        """Bring back what was parked; gradients are zero then. Returns the allocated bytes."""
        return sum(
            tensor.fetch(keep_values=kind == "params") for kind in what for tensor in self._parkable.get(kind, ())
        )

    @contextmanager
    def trained_on_device(self) -> Iterator[None]:
        """Bring back parked weights that are trained inside the block, but none of the others."""
        for tensor in self._trained:
            tensor.fetch(keep_values=True)
        try:
            yield
        finally:
            for tensor in self._trained:
                tensor.park(keep_values=True)

    def rows(self, name: str, tensor: Tensor, first: int, count: int) -> Tensor:
        """Return rows of a weight on its device, also of a parked one that is not trained.

        Args:
            name: the parameter's name.
            tensor: the parameter.
            first: the first of the rows.
            count: their number.
        """
        parked = self._apart.get(name)
        if parked is None or not parked.is_parked:
            return tensor.detach()[first : first + count]
        width = prod(tensor.shape[1:]) * tensor.element_size()
        return parked.read(first * width, (first + count) * width).view(tensor.dtype).view(count, *tensor.shape[1:])
