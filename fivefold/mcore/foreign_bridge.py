"""What bridges of other packages have in common: they load Hugging Face folders, and Fivefold checks what they did.

They read models built of TransformerEngine's layers, in which a norm belongs to the linear layer after it and each
expert is a separate parameter. `presented` shows our parameters as such: what is loaded into a view is loaded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from fivefold.bridge.audit import check_model
from fivefold.bridge.bridge import Bridge, checked_source, not_finite_weights
from fivefold.bridge.export import Rows, over_stages, rows_of
from fivefold.bridge.finite import is_finite
from fivefold.bridge.groups import ShardGroups
from fivefold.bridge.hf_reader import HFWeights
from fivefold.bridge.megatron_names import UNFUSED_NORMS, layer_of
from fivefold.bridge.reading import TensorReader
from fivefold.families.shape import ModelShape
from fivefold.weights.stream import Stack, alone


class ForeignBridge(Bridge, ABC):
    """Loads Hugging Face folders and exports weights with another package; all else is done by Fivefold's mappings."""

    name: ClassVar[str]
    """Name of the package."""
    reads_parts = False

    def __init__(self, shape: ModelShape) -> None:
        """Take the shape of a model.

        Raises:
            ValueError: the model is a critic.
        """
        super().__init__(shape)
        if shape.value_head:
            raise ValueError(f"bridge_type={self.name} has no value heads: set bridge_type to fivefold")

    @abstractmethod
    def _fill(self, parameters: Mapping[str, Tensor], folder: Path, groups: ShardGroups) -> None:
        """Let the package fill this rank's parameters from a folder."""

    @abstractmethod
    def _exported(self, parameters: Mapping[str, Tensor], groups: ShardGroups) -> Iterator[tuple[str, Tensor]]:
        """Yield Hugging Face tensors as the package does, on all ranks."""

    @torch.no_grad()
    def load(self, parameters: Mapping[str, Tensor], source: TensorReader, groups: ShardGroups) -> None:
        """Fill this rank's parameters with the package if `source` is a Hugging Face folder; see `Bridge.load`.

        Raises:
            ValueError: besides, the package has left a parameter unfilled, or does not know one.
        """
        if not isinstance(source, HFWeights):
            super().load(parameters, source, groups)
            return
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        check_model(self.mappings, over_stages(shapes, groups), groups)
        checked_source(self._shape, source)
        for parameter in parameters.values():
            parameter.fill_(torch.nan)
        self._fill(parameters, source.folder, groups)
        self._check_filled(parameters, source)

    def _check_filled(self, parameters: Mapping[str, Tensor], source: TensorReader) -> None:
        """Check that every parameter, which was NaN before, has finite values."""
        left = [name for name, parameter in parameters.items() if not is_finite(parameter)]
        tensors = {tensor: parameters[name].dtype for name in left for tensor in self.mappings[name].sources()}
        if any(not is_finite(source.read(tensor).to(dtype)) for tensor, dtype in tensors.items()):
            raise not_finite_weights(tensors, source)
        if left:
            raise ValueError(
                f"{self.name} has left {', '.join(left[:3])}{' and others' if len(left) > 3 else ''} without values: "
                "set bridge_type to fivefold"
            )

    def export(
        self,
        parameters: Mapping[str, Tensor],
        groups: ShardGroups,
        *,
        dtype: torch.dtype | None = None,
        readers: frozenset[int] | None = None,
        rows: Rows = rows_of,
    ) -> Iterable[Stack]:
        """Return what yields every Hugging Face tensor as the package exports it, which reads weights by itself."""
        reads = readers is None or torch.distributed.get_rank() in readers
        return _TheirExport(lambda: self._exported(parameters, groups), dtype, reads)


@dataclass(frozen=True)
class _TheirExport:
    """Yields the tensors of a package's export."""

    exported: Callable[[], Iterator[tuple[str, Tensor]]]
    dtype: torch.dtype | None
    reads: bool
    """Whether this rank reads the tensors."""

    def __iter__(self) -> Iterator[Stack]:
        sent: set[str] = set()
        for name, tensor in self.exported():
            # The last stage of a pipeline has a copy of a tied embedding.
            if name not in sent:
                sent.add(name)
                tensor = tensor.detach() if self.dtype is None else tensor.detach().to(self.dtype)
                yield alone(name, tensor.contiguous() if self.reads else tensor.to("meta"))


def presented(parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, int]]:
    """Yield this rank's parameters under the names of a model of TransformerEngine's layers, with views of experts.

    Yields:
        Name, in which layers are numbered among this rank's; tensor; dimension along which it is cut, -1 for none.
    """
    places = {layer: place for place, layer in enumerate(layer_numbers(parameters))}
    routed = {layer_of(name) for name in parameters if ".mlp.router." in name}
    for name, parameter in parameters.items():
        layer = layer_of(name)
        local = name if layer is None else name.replace(f"layers.{layer}.", f"layers.{places[layer]}.", 1)
        for theirs, view in _views(local, parameter.detach(), has_experts=layer in routed):
            dim = getattr(parameter, "partition_dim", 0) - (parameter.ndim - view.ndim)
            yield theirs, view, dim if getattr(parameter, "tensor_model_parallel", False) else -1


def layer_numbers(parameters: Mapping[str, Tensor]) -> list[int]:
    """Return the numbers of this rank's layers in the whole model, from 0."""
    return sorted({layer for name in parameters if (layer := layer_of(name)) is not None})


def _views(name: str, parameter: Tensor, *, has_experts: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield a parameter under its name in a model of TransformerEngine's layers, or one view for each expert."""
    for ours, theirs in (("experts.weight1", "experts.linear_fc1"), ("experts.weight2", "experts.linear_fc2")):
        if name.endswith(ours):
            prefix = name.removesuffix(ours) + theirs
            yield from ((f"{prefix}.weight{expert}", weight) for expert, weight in enumerate(parameter.unbind()))
            return
    for theirs, ours in UNFUSED_NORMS.items():
        # The norm before experts is a separate module in their layers too.
        if name.endswith(f".{ours}") and not (has_experts and theirs.startswith("mlp.")):
            name = name.removesuffix(ours) + theirs
    yield name, parameter.view_as(parameter)
