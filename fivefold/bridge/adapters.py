"""Reads a model with adapters from a folder that has none: A is drawn at random and B is 0, so that nothing changes."""

from __future__ import annotations

import zlib
from math import sqrt
from pathlib import Path

import torch
from torch import Tensor

from fivefold.bridge.reading import TensorReader
from fivefold.families.shape import ModelShape
from fivefold.families.tensors import Shape, tensors


class WithAdapters:
    """The tensors of a model, and its adapters.

    A is uniform in +-1 / sqrt(inputs), as PEFT draws it, from a generator that is seeded by the seed and its name. The
    numbers are the same on every layout.

    Args:
        source: the tensors of the model itself.
        shape: the model with its adapters.
        seed: seed of A.
    """

    def __init__(self, source: TensorReader, shape: ModelShape, seed: int) -> None:
        self._source, self._seed = source, seed
        self._new: dict[str, Shape] = {
            name: tensor.shape for tensor in tensors(shape) if tensor.adapts for name in tensor.names
        }

    @property
    def folder(self) -> Path:
        """The model's folder."""
        return self._source.folder

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors, the adapters included."""
        return self._source.names | self._new.keys()

    def shape(self, name: str) -> Shape:
        """Return the shape of a tensor."""
        return self._new[name] if name in self._new else self._source.shape(name)

    def file(self, name: str) -> str:
        """Return the name of the file that holds a tensor."""
        return "a new adapter" if name in self._new else self._source.file(name)

    def read(self, name: str, *index: slice) -> Tensor:
        """Return the tensor `name`, or the part of it that `index` selects along its first dimensions."""
        if name not in self._new:
            return self._source.read(name, *index)
        return self._drawn(name)[index or slice(None)]

    def _drawn(self, name: str) -> Tensor:
        if name.endswith("lora_B.weight"):
            return torch.zeros(self._new[name])
        bound = 1 / sqrt(self._new[name][1])
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        return torch.empty(self._new[name]).uniform_(-bound, bound, generator=generator)
