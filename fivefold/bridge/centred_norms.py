"""The output norms of gated delta nets as checkpoints of Megatron-Core hold them: weight - 1.

All norms of Megatron-Core's models with gated delta nets multiply by 1 + weight. In files of Hugging Face, only the
others do, and this one multiplies by its weight. The difference is rounded in neither direction:

    file, bfloat16       weight        checkpoint, bfloat16            weight - 1
                                       or in the first of float32 and float64 that holds it, e.g. of 0.1
    checkpoint           weight - 1    file, as the layer's matrices   weight
                                       or float32, in which Megatron-Core adds the 1, where they do not hold it
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fivefold.bridge.decoder import mappings
from fivefold.bridge.reading import TensorReader, WithFurther
from fivefold.families.shape import ModelShape

_NORM, _MATRIX = ".self_attention.norm.weight", ".self_attention.linear_proj.weight"


def centred_norms(shape: ModelShape) -> Mapping[str, str]:
    """Return the Hugging Face names of these norms, each with the one of a matrix of its layer."""
    if shape.delta is None or not shape.zero_centered_norms:
        return {}
    found = {mapping.parameter: mapping.tensors[0].name for mapping in mappings(shape)}
    return {
        name: found[parameter.removesuffix(_NORM) + _MATRIX]
        for parameter, name in found.items()
        if parameter.endswith(_NORM)
    }


def centred(name: str, weight: Tensor) -> Tensor:
    """Return weight - 1 of the tensor `name`, in the first of its dtype, float32 and float64 that holds it.

    Raises:
        ValueError: none does.
    """
    wanted = weight.double()
    difference = wanted - 1
    if torch.equal(difference + 1, wanted):
        for dtype in (weight.dtype, torch.float32):
            if torch.equal(difference.to(dtype).double(), difference):
                return difference.to(dtype)
        return difference
    least = wanted[difference + 1 != wanted].abs().min().item()
    raise ValueError(
        f"{name} has a weight of {least:g}, and checkpoints of Megatron-Core hold weight - 1, in which bits of it "
        "would be lost: use the Hugging Face folder"
    )


def uncentred(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Return stored + 1, computed in float32, in `dtype` if that holds it."""
    weight = (stored.double() + 1).float()
    return weight.to(dtype) if torch.equal(weight.to(dtype).float(), weight) else weight


class CentredNorms(WithFurther):
    """The tensors of a source, these norms in their place as checkpoints hold them (`TensorReader`).

    Args:
        source: the tensors.
        shape: the model.
        dtype: dtype to which the norms are rounded before; None: they are not.
    """

    def __init__(self, source: TensorReader, shape: ModelShape, dtype: torch.dtype | None) -> None:
        super().__init__(source, {name: source.shape(name) for name in centred_norms(shape)})
        self._dtype = dtype

    def _origin(self, name: str) -> str:
        return self._source.file(name)

    def _read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        weight = self._source.read(name)
        return centred(name, weight if self._dtype is None else weight.to(self._dtype))[index]
