"""The weights of a frozen model as an exponential moving average (EMA) of a trained model's.

    ema = decay * ema + (1 - decay) * trained         decay 0: a copy

The average stays in float32: its steps are too small for bfloat16. A checkpoint holds it as float32 tensors
`param/<Hugging Face name>`, whatever the layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.bridge.groups import ShardGroups
from fivefold.bridge.mapping import Shape, TensorReader, WeightMapping
from fivefold.bridge.pieces import Piece
from fivefold.engine.state.state_store import HostSnapshot, StateWriter, StoredRange, WrittenSnapshot
from fivefold.engine.state.stored_state import StoredState

KIND = "param"
"""First part of the keys in a checkpoint."""


@dataclass(frozen=True, eq=False)
class HeldWeight:
    """The elements of one parameter that this rank holds."""

    mapping: WeightMapping
    values_N: Tensor
    """The elements, flat, as a view of the parameter."""
    begin: int = 0
    """Index of the first one in the flattened parameter."""
    is_stored: bool = True
    """Whether this rank writes them to checkpoints; among replicas, the first one does."""

    def cuts(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        """Yield what this rank holds of some pieces of the parameter."""
        for piece in pieces:
            yield from piece.within(self.begin, self.begin + self.values_N.numel())


class EMAWeights:
    """This rank's weights of a frozen model, an EMA of another model's.

    Args:
        weights: this rank's weights by name.
        shapes: names and full shapes of the model's Hugging Face tensors.
        groups: this rank's groups.
        decay: the decay, in [0, 1); 0 copies.
    """

    def __init__(
        self, weights: Mapping[str, HeldWeight], shapes: Mapping[str, Shape], groups: ShardGroups, decay: float
    ) -> None:
        self._weights, self._shapes, self._groups = weights, shapes, groups
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

    def _fill(self, target_N: Tensor, weight: HeldWeight, source: TensorReader) -> None:
        """Copy this rank's elements of a parameter from whole tensors; padding becomes zero."""
        target_N.zero_()
        for cut in weight.cuts(weight.mapping.pieces(self._groups)):
            cut.view(target_N, weight.begin).copy_(source.read(cut.name, *cut.index))

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
