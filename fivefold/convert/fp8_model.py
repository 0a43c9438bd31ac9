"""Hugging Face folders whose weights are float8 in blocks, as DeepSeek publishes its models, to ordinary ones.

w.weight            float8 [out, in]
w.weight_scale_inv  float32 [out / 128, in / 128], rounded up    ──> w.weight = float8 * scale of its block
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fivefold.bridge.bridge import checked_source
from fivefold.bridge.hf_reader import HFWeights, resolve_model_folder
from fivefold.bridge.hf_writer import save_hf, tensor_specs
from fivefold.convert.megatron import Converted, has_further_layers, left_out
from fivefold.convert.target import Progress, free_target, streamed
from fivefold.families.read import load_shape
from fivefold.json_text import parsed

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALE = "_scale_inv"
"""Suffix of a weight's name in the name of its scales."""


def convert_fp8(
    source: str | Path,
    out: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Converted:
    """Write a model of float8 weights in floating point.

    Args:
        source: the model's folder.
        out: the folder to write. It appears when it is complete.
        dtype: dtype of the weights, apart from routers' offsets, which are float32.
        overwrite: whether an earlier model folder at `out` may be replaced.
        progress: receives how far the conversion is.

    Raises:
        ValueError: no such model, one that is quantized in another way or whose weights are not whole, or something at
            `out`.
        OSError: the disk is full, or the file system refuses to write.
    """
    target, folder = free_target(out, overwrite=overwrite), resolve_model_folder(source)
    shape = load_shape(folder)
    with HFWeights(folder) as stored:
        weights = _Dequantized(stored, _block_size(folder))
        checked_source(shape, weights)
        tensors = tensor_specs(shape, dtype)
        save_hf(target, streamed(weights, tensors, progress), folder, tensors=tensors)
        return Converted(shape, len(tensors), left_out(further_layers=has_further_layers(stored, shape)))


def _block_size(folder: Path) -> tuple[int, int]:
    stated = parsed((folder / "config.json").read_text())["quantization_config"]
    config: dict[str, Any] = stated if isinstance(stated, dict) else {}
    block: Any = config.get("weight_block_size")
    is_size = isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
    if config.get("quant_method") != "fp8" or not is_size:
        raise ValueError(
            f"{folder} is quantized with quant_method={config.get('quant_method')!r} and weight_block_size={block!r}; "
            "only fp8 in blocks is converted: take the model in another format"
        )
    return block[0], block[1]


class _Dequantized:
    """The tensors of a folder; float8 tensors are multiplied by the scales of their blocks."""

    def __init__(self, stored: HFWeights, block: tuple[int, int]) -> None:
        self._stored, self._block = stored, block
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
