"""The parameters of a model on one rank, and which of them are trained: the one list that everything reads.

all        loading, export, model folders, offloading, copies that follow a trained model
trained    gradient buffers, optimizer, training state on disk
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from fivefold.bridge.groups import ShardGroups
from fivefold.bridge.mapping import WeightMapping
from fivefold.bridge.pieces import Piece
from fivefold.families.tensors import Shape, Trained


@dataclass(frozen=True, eq=False)
class Parameter:
    """One parameter as far as this rank holds it, or the offsets of a router, which are kept like one."""

    mapping: WeightMapping
    tensor: Tensor
    """The parameter of the model, or the buffer of the offsets."""
    is_trained: bool
    is_stored: bool
    """Whether this rank stores its elements; of replicas that hold the same, one does."""
    begin: int = 0
    """First element that this rank holds, in the flattened shard of the mapping."""

    @property
    def name(self) -> str:
        """The parameter's name in the engine."""
        return self.mapping.parameter

    @property
    def has_gradient(self) -> bool:
        """Whether gradients change it. Offsets of routers are trained without one."""
        return self.is_trained and not self.mapping.keeps_float32

    @property
    def values_N(self) -> Tensor:
        """The elements that this rank holds, flat, as a view."""
        return self.tensor.detach().view(-1)

    def cuts(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Yield the parts of pieces of the parameter that this rank holds."""
        end = self.begin + self.values_N.numel()
        for piece in pieces:
            yield from piece.within(self.begin, end)


P = TypeVar("P", bound=Parameter)


class Parameters(Generic[P]):
    """The parameters of one rank, in the model's order.

    Args:
        held: the parameters.
        mappings: the mappings of the whole model by parameter.
        trained: names of the parameters of the whole model that are trained.
        groups: this rank's place.
    """

    def __init__(
        self, held: Iterable[P], mappings: Mapping[str, WeightMapping], trained: frozenset[str], groups: ShardGroups
    ) -> None:
        self._by_name = {parameter.name: parameter for parameter in held}
        self.groups = groups
        self.tensors: dict[str, Tensor] = {name: parameter.tensor for name, parameter in self._by_name.items()}
        """The tensor of each parameter, by its name."""
        self.shapes = _hf_shapes(mappings.values())
        """Names and full shapes of the whole model's Hugging Face tensors."""
        self.trained_shapes = _hf_shapes(mapping for name, mapping in mappings.items() if name in trained)
        """The same of those that are trained."""

    def __iter__(self) -> Iterator[P]:
        return iter(self._by_name.values())

    def __getitem__(self, name: str) -> P:
        return self._by_name[name]

    @property
    def with_gradient(self) -> list[P]:
        """The parameters that gradients change."""
        return [parameter for parameter in self if parameter.has_gradient]

    @property
    def offsets(self) -> list[P]:
        """The offsets of routers that are trained, which no gradient changes."""
        return [parameter for parameter in self if parameter.is_trained and not parameter.has_gradient]


def _hf_shapes(mappings: Iterable[WeightMapping]) -> dict[str, Shape]:
    return {name: full for mapping in mappings for name, full in mapping.hf_shapes().items()}


def trained_parameters(mappings: Iterable[WeightMapping], trained: Trained) -> frozenset[str]:
    """Return the names of the parameters that are trained.

    Raises:
        ValueError: a parameter holds trained and frozen tensors.
    """
    names = set()
    for mapping in mappings:
        sources = list(mapping.sources())
        learning = [name for name in sources if name in trained]
        if learning and len(learning) < len(sources):
            frozen = next(name for name in sources if name not in trained)
            raise ValueError(
                f"{frozen} is frozen and {learning[0]} is trained, but {mapping.parameter} holds both: freeze both or "
                "none"
            )
        if learning:
            names.add(mapping.parameter)
    return frozenset(names)
