"""Reads a model with adapters: new ones, which change nothing, because B is 0, or those in a folder of PEFT."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fivefold.bridge.reading import TensorReader, WithFurther
from fivefold.families.adapters import CONFIG, PREFIX, WEIGHTS, AdapterShape
from fivefold.families.shape import ModelShape
from fivefold.families.tensors import WeightTensor, tensors
from fivefold.json_text import read_object


class WithAdapters(WithFurther):
    """The tensors of a model, and its adapters.

    A is drawn as `lora.init` says, from a generator that is seeded by the seed and its name, and is the same on
    every layout.

    Args:
        source: the tensors of the model itself.
        shape: the model with its adapters.
        seed: seed of A.

    Raises:
        ValueError: a folder of adapters that is none, or whose adapters are others than the model's.
    """

    def __init__(self, source: TensorReader, shape: ModelShape, seed: int) -> None:
        own = [tensor for tensor in tensors(shape) if tensor.adapts]
        super().__init__(source, {name: tensor.shape for tensor in own for name in tensor.names})
        self._seed = seed
        assert shape.adapters is not None
        self._init, path = shape.adapters.init, shape.adapters.path
        self._stored = None if path is None else StoredAdapters(Path(path), own, shape.adapters)

    def _origin(self, name: str) -> str:
        return "a new adapter" if self._stored is None else WEIGHTS

    def _read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        whole = self._drawn(name) if self._stored is None else self._stored.read(name)
        return whole[index]

    def _drawn(self, name: str) -> Tensor:
        if name.endswith("lora_B.weight"):
            return torch.zeros(self._further[name])
        rank, inputs = self._further[name]
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        drawn = torch.empty(rank, inputs)
        if self._init == "kaiming":
            return drawn.uniform_(-1 / sqrt(inputs), 1 / sqrt(inputs), generator=generator)
        std = sqrt(2 / (inputs + rank)) if self._init == "xavier" else 1 / rank
        return drawn.normal_(std=std, generator=generator)


class StoredAdapters:
    """The adapters in a folder that PEFT or Fivefold has written."""

    def __init__(self, folder: Path, matrices: Sequence[WeightTensor], adapters: AdapterShape) -> None:
        """Check that they are the wanted ones.

        Args:
            folder: the folder.
            matrices: the matrices of the model's adapters.
            adapters: the model's adapters, whose scale B is converted to.

        Raises:
            ValueError: a file is missing or damaged, or the adapters are others.
        """
        self._folder, self._adapters = folder, adapters
        self._copies = {tensor.name: tensor.names_in_peft for tensor in matrices if tensor.shared_by is not None}
        wanted = {name: tensor.shape for tensor in matrices for name in tensor.names_in_peft}
        try:
            self._config = read_object(folder / CONFIG)
            # Once: the header has every expert's matrices, and parsing it for each of them would take minutes.
            self._file = safe_open(folder / WEIGHTS, "pt")
        except (OSError, SafetensorError) as error:
            raise ValueError(f"lora.path={str(folder)!r} is no folder of adapters that can be read: {error}") from error
        found = {
            name.removeprefix(PREFIX): tuple(self._file.get_slice(name).get_shape())
            for name in self._file.keys()  # noqa: SIM118 - not a mapping
        }
        for name in sorted(wanted.keys() | found.keys()):
            if wanted.get(name) != found.get(name):
                own, theirs = (f"{list(shapes[name])}" if name in shapes else "none" for shapes in (wanted, found))
                raise ValueError(
                    f"lora.path={str(folder)!r} holds other adapters than the recipe's: of {name} it has {theirs}, and "
                    f"the recipe {own}: set lora.rank, rank_of_experts, targets and experts as they were"
                )

    def read(self, name: str) -> Tensor:
        """Return a matrix, float32; B has the difference of the scales in it.

        Raises:
            ValueError: experts are to share the matrix, and the folder has different ones.
        """
        first, *others = self._copies.get(name, (name,))
        matrix: Tensor = self._file.get_tensor(PREFIX + first).float()
        for other in others:
            if not torch.equal(self._file.get_tensor(PREFIX + other).float(), matrix):
                raise ValueError(
                    f"lora.path={str(self._folder)!r} has different matrices {first} and {other}, which "
                    "lora.experts=shared_outer shares: set lora.experts=each"
                )
        if name.endswith("lora_B.weight"):
            # Not in place: the file's memory would be changed, and the next read of it.
            stored = scale_of(self._config, first.removesuffix(".lora_B.weight"), matrix.shape[1])
            matrix = matrix * (stored / self._adapters.scale(matrix.shape[1]))
        return matrix


def scale_of(config: Mapping[str, Any], layer: str, rank: int) -> float:
    """Return the scale that PEFT's config gives the adapter of a layer, as PEFT finds it.

    Args:
        config: the config.
        layer: the layer's name.
        rank: the adapter's rank, which a config may leave out.
    """
    ranks: dict[str, Any] = config.get("rank_pattern") or {}
    alphas: dict[str, Any] = config.get("alpha_pattern") or {}
    alpha = _of_layer(alphas, layer, config["lora_alpha"])
    of_layer = _of_layer(ranks, layer, config.get("r", rank))
    return float(alpha / (sqrt(of_layer) if config.get("use_rslora") else of_layer))


def _of_layer(patterns: Mapping[str, Any], layer: str, usual: Any) -> Any:
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", layer)), usual)
