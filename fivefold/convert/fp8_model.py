"""Hugging Face folders whose weights are float8 in blocks, as DeepSeek publishes its models, to ordinary ones.

w.weight            float8 [out, in]
w.weight_scale_inv  float32 [out / 128, in / 128], rounded up    ──> w.weight = float8 * scale of its block
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fivefold.bridge.hf_reader import HFWeights
from fivefold.json_text import parsed

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALE = "_scale_inv"
"""Suffix of a weight's name in the name of its scales."""


def _block_size(folder: Path) -> tuple[int, int]:
    stated = parsed((folder / "config.json").read_text())["quantization_config"]
    config: dict[str, Any] = stated if isinstance(stated, dict) else {}
    block: Any = config.get("weight_block_size")
    is_size = isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
    if config.get("quant_method") != "fp8" or not is_size:
        raise ValueError(
            f"{folder} is quantized with quant_method={config.get('quant_method')!r} and weight_block_size={block!r}; "
            "only fp8 in blocks and mxfp4 are converted: take the model in another format"
        )
    return block[0], block[1]


class Float8InBlocks:
    """The tensors of a folder; float8 tensors are multiplied by the scales of their blocks.

    Raises:
        ValueError: the folder is quantized in another way.
    """

    def __init__(self, stored: HFWeights) -> None:
        self._stored, self._block = stored, _block_size(stored.folder)
        self.folder = stored.folder
        self.names = frozenset(name for name in stored.names if not self._is_scale(name))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._stored.shape(name)

    def file(self, name: str) -> str:
        """Return the name of the file that holds a tensor."""
        return self._stored.file(name)

    def read(self, name: str, *index: slice) -> Tensor:
        """Return a tensor, or the part of it that `index` selects; float32 if it was float8.

        Raises:
            ValueError: a float8 tensor without scales, or with scales of other blocks; or one of integers.
        """
        tensor = self._stored.read(name)
        if tensor.dtype in _FLOAT8:
            tensor = tensor.float() * self._scales(name, tensor.shape)
        elif self._stored.dtype(name) is None:
            raise ValueError(
                f"{name} in {self.file(name)} is {tensor.dtype}; only fp8 in blocks is converted: take the model in "
                "another format"
            )
        return tensor[index] if index else tensor

    def _is_scale(self, name: str) -> bool:
        """Return whether a tensor holds the scales of a quantized one; any other scales would be a stray."""
        weight = name.removesuffix(_SCALE)
        return weight != name and weight in self._stored.names and self._stored.dtype(weight) is None

    def _scales(self, name: str, shape: torch.Size) -> Tensor:
        blocks = tuple(-(-size // block) for size, block in zip(shape, self._block, strict=True))
        scales = name + _SCALE
        found = self._stored.shape(scales) if scales in self._stored.names else None
        if found != blocks:
            raise ValueError(
                f"{name} in {self.file(name)} is float8 of shape {list(shape)}, and its scales {scales} must have the "
                f"shape {list(blocks)}, but are {'missing' if found is None else list(found)}: fetch the model again"
            )
        whole = self._stored.read(scales).float()
        for axis, block in enumerate(self._block):
            whole = whole.repeat_interleave(block, dim=axis)
        return whole[: shape[0], : shape[1]]
