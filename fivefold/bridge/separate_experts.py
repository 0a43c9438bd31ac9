"""GPT-OSS's experts as checkpoints of Megatron-Core hold them: gate, up and down apart, and each [out, in].

file          experts.5.gate_up_proj         [H, 2F]   columns gate, up, gate, up, ...
              experts.5.gate_up_proj_bias    [2F]      alike
checkpoint    linear_fc1.weight of expert 5  [2F, H]   rows gate, ..., then up, ...
              linear_fc1.bias                [2F]      alike
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fivefold.bridge.decoder import mappings
from fivefold.bridge.mapping import WeightMapping, mapping_of
from fivefold.bridge.reading import TensorReader
from fivefold.families.shape import ModelShape
from fivefold.families.tensors import Cut

_PARTS = {
    "gate_up_proj": ("gate_proj.weight", "up_proj.weight"),
    "gate_up_proj_bias": ("gate_proj.bias", "up_proj.bias"),
    "down_proj": ("down_proj.weight",),
    "down_proj_bias": ("down_proj.bias",),
}
"""Names of the parts of an expert's tensors."""
_TURNED: dict[Cut, Cut] = {"rows": "columns", "columns": "rows"}
"""How tensor parallelism cuts a matrix whose transpose is cut in this way."""


def stored_mappings(shape: ModelShape) -> Iterator[WeightMapping]:
    """Yield the mapping of each parameter of a model to what a checkpoint of Megatron-Core has of it, in their order.

    The tensors are those that Hugging Face names, or their parts where Megatron-Core holds these apart.
    """
    for mapping in mappings(shape):
        yield _separated(mapping) if mapping.is_joint else mapping


def parts_of(name: str) -> tuple[str, ...]:
    """Return the names of the parts of an expert's tensor, or of the pattern of all experts'."""
    expert, _, kind = name.rpartition(".")
    return tuple(f"{expert}.{part}" for part in _PARTS[kind])


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return an expert's tensor as files hold it, of its parts."""
    whole = torch.stack(list(parts), dim=1).flatten(0, 1) if len(parts) > 1 else parts[0]
    return whole.t() if whole.ndim == 2 else whole


def _separated(mapping: WeightMapping) -> WeightMapping:
    [tensor] = mapping.tensors
    names, (rows, *columns) = parts_of(tensor.name), tensor.shape[::-1]
    cut = _TURNED[tensor.cut] if columns else tensor.cut
    full = (rows // len(names), *columns)
    parts = (replace(tensor, name=name, shape=full, cut=cut, is_joint=False) for name in names)
    return mapping_of(mapping.parameter, *parts)


class SeparateExperts:
    """The tensors of a Hugging Face folder, experts' in parts (`TensorReader`)."""

    def __init__(self, source: TensorReader, shape: ModelShape) -> None:
        self._source = source
        self._parts = {
            part: (name, number)
            for mapping in mappings(shape)
            if mapping.is_joint
            for name in mapping.hf_shapes()
            for number, part in enumerate(parts_of(name))
        }

    @property
    def folder(self) -> Path:
        """The model's folder."""
        return self._source.folder

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return self._source.names - {name for name, _ in self._parts.values()} | self._parts.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        if name not in self._parts:
            return self._source.shape(name)
        whole, _ = self._parts[name]
        rows, *columns = self._source.shape(whole)[::-1]
        return (rows // len(parts_of(whole)), *columns)

    def file(self, name: str) -> str:
        """Return the name of the file that holds a tensor."""
        return self._source.file(self._parts[name][0] if name in self._parts else name)

    def read(self, name: str, *index: slice) -> Tensor:
        """Return the tensor `name`, or the part of it that `index` selects along its first dimensions."""
        if name not in self._parts:
            return self._source.read(name, *index)
        whole, number = self._parts[name]
        tensor = self._source.read(whole)
        turned = tensor.t() if tensor.ndim == 2 else tensor
        part = turned[number :: len(parts_of(whole))]
        return part[index] if index else part
