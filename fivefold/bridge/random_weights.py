"""Random weights under Hugging Face names: the same numbers on every layout."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path

import torch

from fivefold.bridge.decoder import expected_tensors
from fivefold.families.shape import ModelShape
from fivefold.json_text import parsed


class RandomWeights:
    """Stands in for a folder of safetensors. Each tensor is drawn from a generator seeded by the seed and its name.

    Matrices are normal with the config's `initializer_range`, norms are 1 (0 where they multiply by 1 + weight) and
    biases 0, as transformers initialises these families; so are the decays of gated delta nets. All numbers are exact
    in `dtype`, which is the model's, so that master weights of a higher precision are the same in every engine, whether
    it takes them from here or from the model.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        folder: str | Path,
        seed: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        has_zero_centered_norms: bool = False,
    ) -> None:
        config = parsed((Path(folder) / "config.json").read_text())
        # The language model of a model that sees images has its own config, inside the other one.
        text = config.get("text_config") or config
        self._std = float(text.get("initializer_range", 0.02))
        self._shapes = dict(shapes)
        self._seed = seed
        self._device = device
        self._dtype = dtype
        self._folder = Path(folder)
        self._of_norms = 0.0 if has_zero_centered_norms else 1.0

    @classmethod
    def of(
        cls, shape: ModelShape, folder: str | Path, seed: int, device: torch.device, dtype: torch.dtype
    ) -> RandomWeights:
        """Return all weights of a model."""
        centered = shape.zero_centered_norms
        return cls(expected_tensors(shape), folder, seed, device, dtype, has_zero_centered_norms=centered)

    @property
    def folder(self) -> Path:
        """The model's folder."""
        return self._folder

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._shapes[name]

    def file(self, name: str) -> str:
        """Return what errors say in place of the file that holds a tensor."""
        return "random weights"

    def read(self, name: str, *index: slice) -> torch.Tensor:
        """Return the float32 tensor `name`, or the part that `index` selects along its first dimensions."""
        return self._draw(name)[index or slice(None)]

    def _draw(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        if len(shape) == 1 and not name.endswith("A_log"):
            return torch.full(shape, self._first_value(name))
        # The CPU's generator uses 32 bits of a seed, so the seed and the name are hashed into them.
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        if len(shape) == 1:
            drawn = torch.empty(shape, device=self._device).uniform_(0.01, 16.0, generator=generator).log()
        else:
            drawn = torch.randn(shape, generator=generator, device=self._device) * self._std
        return drawn.to(self._dtype).float()

    def _first_value(self, name: str) -> float:
        """Return what all elements of a norm or a bias begin at."""
        if name.endswith(".dt_bias"):
            return 1.0
        if name.endswith("bias"):
            return 0.0
        return 1.0 if name.endswith(".linear_attn.norm.weight") else self._of_norms
