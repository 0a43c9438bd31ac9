"""The weights of a frozen model as an exponential moving average (EMA) of a trained model's.

    ema = decay * ema + (1 - decay) * trained         decay 0: a copy

The average stays in float32: its steps are too small for bfloat16. A checkpoint holds it as float32 tensors
`param/<Hugging Face name>`, whatever the layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.bridge.parameters import Parameter, Parameters
from fivefold.bridge.reading import TensorReader, fill_range
from fivefold.engine.state.state_store import HostSnapshot, StateWriter, StoredRange, WrittenSnapshot
from fivefold.engine.state.stored_state import StoredState

KIND = "param"
"""First part of the keys in a checkpoint."""


class EMAWeights:
    """This rank's weights of a frozen model, an EMA of another model's.

    Args:
        parameters: the frozen model's parameters.
        decay: the decay, in [0, 1); 0 copies.
    """

    def __init__(self, parameters: Parameters[Any], decay: float) -> None:
        weights = {parameter.name: parameter for parameter in parameters}
        self._weights: dict[str, Parameter] = weights
        self._shapes, self._groups = parameters.shapes, parameters.groups
        self._decay = decay
        self._average = {
            name: weight.values_N.float().cpu()
            for name, weight in weights.items()
            if decay > 0 and weight.values_N.dtype != torch.float32
        }
        """Flat float32 averages, in host memory, of weights in other dtypes; a float32 weight is its own average."""
        self._writer: StateWriter | None = None

    @torch.no_grad()
    def follow(self, others: Mapping[str, Tensor]) -> None:
        """Average in a model of the same shape and layout: its flat weights, by the same names."""
        for name, other in others.items():
            self._follow_one(name, other)

    @torch.no_grad()
    def follow_whole(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Average in a model of any layout: its whole tensors by Hugging Face name, in the order of a bridge's export.

        Raises:
            ValueError: a tensor that a parameter of this rank needs is missing.
        """
        waiting = {name: set(weight.mapping.sources()) for name, weight in self._weights.items()}
        arrived = _Arrived()
        for source, tensor in weights:
            arrived.tensors[source] = tensor
            for name in [name for name, sources in waiting.items() if sources <= arrived.tensors.keys()]:
                # In float32: rounding to the frozen model's dtype comes after averaging.
                values_N = torch.empty_like(self._weights[name].values_N, dtype=torch.float32)
                self._fill(values_N, self._weights[name], arrived)
                self._follow_one(name, values_N)
                del waiting[name]
            arrived.keep_only(set().union(*waiting.values()))
        if waiting:
            raise ValueError(f"the weights lack what {', '.join(sorted(waiting)[:3])} need: give all of them")

    def snapshot(self, folder: Path, *, copy: bool) -> HostSnapshot | WrittenSnapshot:
        """Copy this rank's part to host memory, to be written to `folder` later; or write it at once.

        Args:
            folder: the folder of the weights.
            copy: whether to copy.

        Raises:
            ValueError: the last copy is not written yet.
            OSError: without a copy, a file cannot be written; the error names it.
        """
        stored = dict(self._stored())
        if self._writer is None:
            self._writer = StateWriter(dist.get_rank(), list(stored.values()))
        values = (self._average.get(name, self._weights[name].values_N).float() for name in stored)
        return self._writer.snapshot(folder, values, {}) if copy else self._writer.write(folder, values, {})

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Load what the ranks of any layout have written.

        Raises:
            ValueError: the folder holds no such state, or another model's.
        """
        stored = StoredState(folder, KIND)
        stored.check(self._shapes)
        for name, weight in self._weights.items():
            target_N = self._average.get(name, weight.values_N)
            self._fill(target_N, weight, stored)
            if target_N is not weight.values_N:
                weight.values_N.copy_(target_N)

    def _follow_one(self, name: str, other_N: Tensor) -> None:
        values_N = self._weights[name].values_N
        if self._decay == 0:
            values_N.copy_(other_N)
            return
        average_N = self._average.get(name, values_N)
        average_N.mul_(self._decay).add_(other_N.to(average_N.device, torch.float32), alpha=1 - self._decay)
        if average_N is not values_N:
            values_N.copy_(average_N)

    def _fill(self, target_N: Tensor, weight: Parameter, source: TensorReader) -> None:
        """Copy this rank's elements of a parameter from whole tensors; padding becomes zero."""
        fill_range(target_N, weight.begin, weight.mapping, source, self._groups)

    def _stored(self) -> Iterator[tuple[str, StoredRange]]:
        """Yield what this rank stores of each parameter."""
        for name, weight in self._weights.items():
            pieces = tuple(weight.cuts(weight.mapping.stored_pieces(self._groups)))
            if weight.is_stored and pieces:
                yield name, StoredRange(KIND, weight.begin, weight.values_N.numel(), pieces)


class _Arrived:
    """A `TensorReader` of the whole tensors that have arrived."""

    folder = Path("weights of the trained model")

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def file(self, name: str) -> str:
        return "memory"

    def read(self, name: str, *index: slice) -> Tensor:
        return self.tensors[name][index or slice(None)]

    def keep_only(self, names: set[str]) -> None:
        """Drop all tensors but these."""
        self.tensors = {name: tensor for name, tensor in self.tensors.items() if name in names}
