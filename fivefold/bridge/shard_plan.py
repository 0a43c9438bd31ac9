"""The layout of a model's safetensors files, which follows from names, shapes and dtypes before any data is there.

    names, dtypes, shapes ──plan_shards──> files (name, header, size), and the place of every tensor in them

Files have the same bytes whoever writes the data, in whatever order, because every byte has its place from the start.
A file is its header's length (8 bytes), the header (JSON), and the data without gaps.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from fivefold.bridge.weight_files import FUSED, INDEX_FILE, LENGTH_BYTES, SINGLE_FILE, of_fused, of_joint

MAX_SHARD_BYTES = 5_000_000_000
"""Most bytes of tensors in a file, unless a single tensor is larger."""

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of dtypes in a safetensors header."""


@dataclass(frozen=True)
class TensorSpec:
    """Dtype and shape of a whole tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """Return dtype and shape of `tensor`."""
        return cls(tensor.dtype, tuple(tensor.shape))

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"

    @property
    def n_elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def n_bytes(self) -> int:
        """Size in bytes."""
        return self.n_elements * self.dtype.itemsize


@dataclass(frozen=True)
class Place:
    """Where a tensor lies."""

    file: str
    """Name of the file in the model's folder."""
    begin: int
    """Offset of the tensor's first byte from the start of the file."""
    spec: TensorSpec
    turned_at: int | None = None
    """First of the columns of `spec` that are the tensor's rows; None: its rows are rows."""


@dataclass(frozen=True)
class PlannedFile:
    """A safetensors file whose data is still to be written."""

    name: str
    header: bytes
    """Everything before the data."""
    size: int
    """Bytes of the whole file, header included."""


@dataclass(frozen=True)
class ShardPlan:
    """The weight files of a model's folder."""

    files: tuple[PlannedFile, ...]
    places: Mapping[str, Place]
    """Place of every tensor, by name."""

    def place(self, name: str) -> Place:
        """Return the place of a tensor, or of an expert's in the tensor of all experts.

        Raises:
            KeyError: neither is in the plan.
        """
        if name in self.places:
            return self.places[name]
        if (part := of_joint(name)) is not None:
            return self._of_expert(*part, None)
        if (matrix := of_fused(name)) is not None:
            whole, expert, kind = matrix
            kinds = FUSED[whole.rpartition(".")[2]]
            return self._of_expert(whole, expert, kinds.index(kind) * self.places[whole].spec.shape[2] // len(kinds))
        raise KeyError(name)

    def _of_expert(self, whole: str, expert: int, turned_at: int | None) -> Place:
        place = self.places[whole]
        own = TensorSpec(place.spec.dtype, place.spec.shape[1:])
        return Place(place.file, place.begin + expert * own.n_bytes, own, turned_at)

    @property
    def data_bytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(place.spec.n_bytes for place in self.places.values())

    @property
    def file_bytes(self) -> int:
        """Bytes of all weight files together."""
        return sum(file.size for file in self.files)

    @property
    def main_dtype(self) -> torch.dtype:
        """The dtype of most elements."""
        elements: dict[torch.dtype, int] = {}
        for place in self.places.values():
            elements[place.spec.dtype] = elements.get(place.spec.dtype, 0) + place.spec.n_elements
        return max(elements, key=lambda dtype: elements[dtype])

    def index(self) -> tuple[str, str] | None:
        """Return the name and text of the index, which only several files need."""
        if len(self.files) == 1:
            return None
        weight_map = {name: place.file for name, place in self.places.items()}
        text = json.dumps({"metadata": {"total_size": self.data_bytes}, "weight_map": weight_map}, indent=2) + "\n"
        return INDEX_FILE, text


def fused(tensors: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Return the tensors with all experts' matrices [out, in] of a layer in two, [E, in, out], in the first's place."""
    found: dict[str, TensorSpec] = {}
    for name, spec in tensors.items():
        if (matrix := of_fused(name)) is None:
            found[name] = spec
            continue
        whole, expert, _ = matrix
        outputs, inputs = spec.shape
        found[whole] = TensorSpec(spec.dtype, (expert + 1, inputs, outputs * len(FUSED[whole.rpartition(".")[2]])))
    return found


def plan_shards(tensors: Mapping[str, TensorSpec], max_shard_bytes: int = MAX_SHARD_BYTES) -> ShardPlan:
    """Return the files in which `tensors` lie, in the order of the mapping.

    Within a file, tensors of wider dtypes come first, so that every tensor is aligned to its elements.

    Args:
        tensors: dtype and shape of each tensor, by name.
        max_shard_bytes: most bytes of tensors in a file, unless a single tensor is larger.

    Raises:
        ValueError: there are no tensors, or one of a dtype that safetensors files cannot hold.
    """
    if not tensors:
        raise ValueError("a model folder without weights cannot be written: the list of tensors is empty")
    for name, spec in tensors.items():
        if spec.dtype not in _DTYPES:
            known = ", ".join(str(dtype) for dtype in _DTYPES)
            raise ValueError(
                f"{name} is {spec.dtype}, which is not written to safetensors files: convert it to {known}"
            )
    shards = list(_shards(tensors, max_shard_bytes))
    files = []
    places: dict[str, Place] = {}
    for number, names in enumerate(shards, start=1):
        file = SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        header, begins, size = _lay_out({name: tensors[name] for name in names})
        files.append(PlannedFile(file, header, size))
        places |= {name: Place(file, begins[name], tensors[name]) for name in names}
    return ShardPlan(tuple(files), places)


def _shards(tensors: Mapping[str, TensorSpec], max_shard_bytes: int) -> Iterator[list[str]]:
    """Yield the names of the tensors of each file."""
    shard: list[str] = []
    shard_bytes = 0
    for name, spec in tensors.items():
        if shard and shard_bytes + spec.n_bytes > max_shard_bytes:
            yield shard
            shard, shard_bytes = [], 0
        shard.append(name)
        shard_bytes += spec.n_bytes
    yield shard


def _lay_out(tensors: Mapping[str, TensorSpec]) -> tuple[bytes, dict[str, int], int]:
    """Return the header of a file of `tensors`, the offset of each in the file, and the size of the file."""
    # `sorted` is stable: tensors of one width keep the model's order, in which readers want them.
    names: Sequence[str] = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins: dict[str, int] = {}
    end = 0
    for name in names:
        begin, end = end, end + tensors[name].n_bytes
        begins[name] = begin
        entries[name] = {
            "dtype": _DTYPES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    # The format asks for data that begins at a multiple of 8, and allows spaces after the JSON.
    text += b" " * (-len(text) % LENGTH_BYTES)
    header = len(text).to_bytes(LENGTH_BYTES, "little") + text
    return header, {name: len(header) + begin for name, begin in begins.items()}, len(header) + end
