"""Weights of a frozen model that follow those of a trained one: copied from time to time, or as a moving average.

    weights = decay * weights + (1 - decay) * those of the trained model         decay 0: a copy

An average is kept in float32, because steps of it are smaller than bfloat16 can tell. In a checkpoint the weights are
tensors `param/<Hugging Face name>` in float32, free of any layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.bridge.groups import ShardGroups
from fivefold.bridge.mapping import Shape, WeightMapping
from fivefold.engine.state_store import HostSnapshot, StateWriter, StoredRange, WrittenSnapshot
from fivefold.engine.stored_state import StoredState
from fivefold.layout.grid import rank_grid
from fivefold.layout.parallel import ParallelLayout

KIND = "param"
"""First part of the keys in a checkpoint."""


class MovingWeights:
    """This rank's weights of a frozen model, which follow another model's.

    Args:
        parameters: the weights of this rank by name.
        mappings: the mapping of each of them.
        shapes: names and full shapes of the model's Hugging Face tensors.
        groups: where this rank stands.
        layout: the layout of all ranks.
        decay: what the weights keep of themselves when they follow, in [0, 1).
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        mappings: Mapping[str, WeightMapping],
        shapes: Mapping[str, Shape],
        groups: ShardGroups,
        layout: ParallelLayout,
        decay: float,
    ) -> None:
        self._parameters, self._mappings, self._shapes, self._groups = parameters, mappings, shapes, groups
        self._decay = decay
        self._position = rank_grid(layout)[dist.get_rank()]
        self._average = {
            name: parameter.detach().float().cpu()
            for name, parameter in parameters.items()
            if decay > 0 and parameter.dtype != torch.float32
        }
        """Averages in host memory, of the weights that are not in float32 themselves."""
        self._writer: StateWriter | None = None

    @torch.no_grad()
    def follow(self, others: Mapping[str, Tensor]) -> None:
        """Follow weights of the same names on the same layout."""
        for name, other in others.items():
            self._follow_one(name, other)

    @torch.no_grad()
    def follow_whole(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Follow whole tensors by Hugging Face name, in the order in which a bridge exports them, of any layout.

        Raises:
            ValueError: a tensor that a parameter of this rank needs has not come.
        """
        waiting = {name: set(self._mappings[name].sources()) for name in self._parameters}
        arrived = _Arrived()
        for source, tensor in weights:
            arrived.tensors[source] = tensor
            for name in [name for name, sources in waiting.items() if sources <= arrived.tensors.keys()]:
                # In float32, so that weights are not rounded to the frozen model's dtype before they are averaged.
                parameter = torch.empty_like(self._parameters[name], dtype=torch.float32)
                self._mappings[name].fill(parameter, arrived, self._groups)
                self._follow_one(name, parameter)
                del waiting[name]
            arrived.keep(set().union(*waiting.values()))
        if waiting:
            raise ValueError(f"the weights that came lack those of {', '.join(sorted(waiting)[:3])}: give all of them")

    def snapshot(self, folder: Path, *, copy: bool) -> HostSnapshot | WrittenSnapshot:
        """Copy this rank's part to host memory, to be written to `folder`; or write it there at once.

        Args:
            folder: the folder of the weights.
            copy: whether to copy.

        Raises:
            ValueError: the last copy still exists and is not written yet.
            OSError: without a copy, a file cannot be written; the error names it.
        """
        stored = dict(self._stored())
        if self._writer is None:
            self._writer = StateWriter(dist.get_rank(), list(stored.values()))
        values = (self._average.get(name, self._parameters[name].detach()).float().view(-1) for name in stored)
        return self._writer.snapshot(folder, values, {}) if copy else self._writer.write(folder, values, {})

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Load what all ranks of this layout or any other have written.

        Raises:
            ValueError: the folder holds no such state, or that of another model.
        """
        stored = StoredState(folder, KIND)
        stored.check(self._shapes)
        for name, parameter in self._parameters.items():
            target = self._average.get(name, parameter)
            self._mappings[name].fill(target, stored, self._groups)
            if target is not parameter:
                parameter.copy_(target)

    def _follow_one(self, name: str, other: Tensor) -> None:
        parameter = self._parameters[name]
        if self._decay == 0:
            parameter.copy_(other)
            return
        average = self._average.get(name, parameter)
        average.mul_(self._decay).add_(other.to(average.device, torch.float32), alpha=1 - self._decay)
        if average is not parameter:
            parameter.copy_(average)

    def _stored(self) -> Iterator[tuple[str, StoredRange]]:
        """Yield what this rank stores of each parameter: of replicas, the first one stores."""
        for name, parameter in self._parameters.items():
            mapping, position = self._mappings[name], self._position
            is_first = position.edp == 0 if mapping.domain == "expert" else position.dp == position.cp == 0
            pieces = tuple(mapping.stored_pieces(self._groups))
            if is_first and pieces:
                yield name, StoredRange(KIND, 0, parameter.numel(), pieces)


class _Arrived:
    """Whole tensors that have arrived: a `TensorReader`."""

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

    def keep(self, names: set[str]) -> None:
        """Forget all tensors but those of these names."""
        self.tensors = {name: tensor for name, tensor in self.tensors.items() if name in names}
