"""Hugging Face folders whose experts are MXFP4, as OpenAI publishes GPT-OSS, to ordinary ones.

experts.gate_up_proj_blocks  uint8 [E, out, in / 32, 16], two values of 4 bits in each, the lower bits first
experts.gate_up_proj_scales  uint8 [E, out, in / 32], exponents of 2 plus 127    ──> experts.gate_up_proj [E, in, out]

MX formats: https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf, sections 5 and 6.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fivefold.bridge.hf_reader import HFWeights
from fivefold.bridge.weight_files import of_joint, part_of_joint

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of E2M1 without their sign, which is the fourth bit."""
_BLOCKS, _SCALES = "_blocks", "_scales"
_IN_BLOCK = 32
_EXPONENT_OF_1 = 127


class MXFP4Experts:
    """The tensors of a folder; experts' weights are those that blocks and scales stand for.

    Raises:
        ValueError: blocks without scales, or of another shape or dtype.
    """

    def __init__(self, stored: HFWeights) -> None:
        self._stored = stored
        self.folder = stored.folder
        self._shapes: dict[str, tuple[int, ...]] = {}
        """Shape of each expert's weight that is made of a block."""
        plain = set(stored.names)
        for name in stored.names:
            if name.endswith(_BLOCKS):
                self._add(name.removesuffix(_BLOCKS))
                plain -= {name, name.removesuffix(_BLOCKS) + _SCALES}
        self.names = frozenset(plain | self._shapes.keys())

    def _add(self, weight: str) -> None:
        """Note the weight of all experts that is called so."""
        blocks, scales = weight + _BLOCKS, weight + _SCALES
        shape = self._stored.shape(blocks)
        found = self._stored.shape(scales) if scales in self._stored.names else None
        if len(shape) != 4 or shape[3] != _IN_BLOCK // 2 or found != shape[:3]:
            raise ValueError(
                f"{blocks} in {self._stored.file(blocks)} has the shape {list(shape)}, and must have [experts, out, "
                f"blocks, {_IN_BLOCK // 2}]; its scales {scales} must have the first three, but are "
                f"{'missing' if found is None else list(found)}: fetch the model again"
            )
        for expert in range(shape[0]):
            self._shapes[part_of_joint(weight, expert)] = (shape[2] * _IN_BLOCK, shape[1])

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._shapes[name] if name in self._shapes else self._stored.shape(name)

    def file(self, name: str) -> str:
        """Return the name of the file that holds a tensor."""
        return self._stored.file(self._source(name)[0] if name in self._shapes else name)

    def read(self, name: str, *index: slice) -> Tensor:
        """Return a tensor, or the part of it that `index` selects; float32 if it was MXFP4."""
        if name not in self._shapes:
            return self._stored.read(name, *index)
        blocks, expert = self._source(name)
        one = slice(expert, expert + 1)
        codes = self._stored.read(blocks, one)[0]
        exponents = self._stored.read(blocks.removesuffix(_BLOCKS) + _SCALES, one)[0].int() - _EXPONENT_OF_1
        values = torch.tensor((*_VALUES, *(-value for value in _VALUES)))
        pairs = torch.stack((values[(codes & 0xF).int()], values[(codes >> 4).int()]), dim=-1)
        weight = torch.ldexp(pairs.flatten(2), exponents.unsqueeze(-1)).flatten(1).t()
        return weight[index] if index else weight

    def _source(self, name: str) -> tuple[str, int]:
        """Return the blocks that hold an expert's weight, and the number of the expert."""
        part = of_joint(name)
        assert part is not None, name
        return part[0] + _BLOCKS, part[1]
