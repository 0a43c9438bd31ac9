"""Reads a Megatron-Core checkpoint (`torch_dist`) under Hugging Face names, slice by slice.

Hugging Face tensor, rows a..b  ──mapping──>  rows of a parameter  ──spelling──>  rows of stored tensors
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from fivefold.bridge.audit import listed, raise_if_any, strays
from fivefold.bridge.centred_norms import centred_norms, uncentred
from fivefold.bridge.dcp_folder import DCPFolder
from fivefold.bridge.groups import ShardGroups
from fivefold.bridge.mapping import VocabParallel, WeightMapping, mapping_of
from fivefold.bridge.megatron_names import CENTRED, Part, Spelling, check_layers, spellings
from fivefold.bridge.separate_experts import joined, parts_of, stored_mappings
from fivefold.families.registry import find_family
from fivefold.families.shape import ModelShape
from fivefold.families.tensors import OUTPUT, Shape, WeightTensor, tensors
from fivefold.families.torch_dist import find_torch_dist

_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\..*")
"""Keys of an optimizer's state, which is not read."""
_FURTHER = "mtp."
"""How keys of layers for multi-token prediction begin, which are not read."""
_INSIDE = "language_model."
"""How the prefix of a language model's keys ends that is a part of a larger model, whose other parts are not read."""
_EMBEDDING = "embedding.word_embeddings.weight"
_OUTPUT = "output_layer.weight"
_ONE_PROCESS = ShardGroups()


@dataclass(frozen=True)
class _Run:
    """Consecutive rows of a Hugging Face tensor that lie together in a stored tensor."""

    first: int
    """First row in the Hugging Face tensor."""
    n_rows: int
    part: Part
    row: int
    """First row in the stored tensor, after its leading dimensions."""


@dataclass(frozen=True)
class _Entry:
    """A Hugging Face tensor of the checkpoint."""

    shape: Shape
    runs: tuple[_Run, ...]


class MegatronWeights:
    """The weights of a Megatron-Core checkpoint, as a reader of Hugging Face tensors.

    Each tensor's key, shape and file are checked at once; data is read when it is asked for. The optimizer's state and
    layers for multi-token prediction, if the checkpoint has such, are left alone. As a context manager it closes its
    files on exit.

    Args:
        path: the checkpoint, or Megatron-LM's folder of several, whose newest is read.
        shape: the model.

    Raises:
        ValueError: there is no such checkpoint, it is not whole, or it holds another model; the message names the keys.
    """

    def __init__(self, path: str | Path, shape: ModelShape) -> None:
        check_layers(shape)
        self.folder = find_torch_dist(path)
        self._stored = DCPFolder(self.folder)
        self._prefix = _common_prefix(self._stored.names)
        self._may_predict_further = find_family(shape.family).may_predict_further
        self._entries = self._match(shape)
        # Hugging Face's tensors of experts that are stored in parts, with their shapes.
        self._joint = {name: each.shape for each in tensors(shape) if each.is_joint for name in each.names}
        self._centred = {
            name: matrix
            for name, matrix in centred_norms(shape).items()
            if self._entries[name].runs[0].part.key.endswith(CENTRED)
        }
        self._names = frozenset(self._entries) - {part for name in self._joint for part in parts_of(name)}

    @property
    def names(self) -> frozenset[str]:
        """Hugging Face names of all tensors."""
        return self._names | self._joint.keys()

    @property
    def has_optimizer(self) -> bool:
        """Whether the checkpoint holds an optimizer's state too."""
        return any(_OPTIMIZER.fullmatch(key) for key in self._stored.names)

    @property
    def has_further_layers(self) -> bool:
        """Whether the checkpoint holds layers for multi-token prediction too, where its family may have such."""
        return self._may_predict_further and any(key.startswith(self._prefix + _FURTHER) for key in self._stored.names)

    @property
    def has_other_parts(self) -> bool:
        """Whether the language model is a part of the checkpoint's model, which has others too, such as a tower."""
        return any(self._is_of_other_part(key) for key in self._stored.names)

    def shape(self, name: str) -> Shape:
        """Return the shape of a Hugging Face tensor."""
        return self._joint[name] if name in self._joint else self._entries[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which a tensor is stored; of a centred norm, the one in which it is read."""
        if name in self._centred:
            return self.read(name).dtype
        return self._stored.dtype(self._prefix + self._entry(name).runs[0].part.key)

    def file(self, name: str) -> str:
        """Return the name of the file that holds a tensor; the first one where there are several."""
        part = self._entry(name).runs[0].part
        return self._stored.file(self._prefix + part.key, *part.lead)

    def read(self, name: str, *index: slice) -> Tensor:
        """Return the tensor `name` on the CPU, or the part of it that `index` selects along its first dimensions.

        Raises:
            ValueError: a file is damaged.
        """
        if name in self._joint:
            whole = joined([self._read(self._entries[part], ()) for part in parts_of(name)])
            return whole[index] if index else whole
        if name in self._centred:
            norm = uncentred(self._read(self._entries[name], ()), self.dtype(self._centred[name]))
            return norm[index] if index else norm
        return self._read(self._entries[name], index)

    def _entry(self, name: str) -> _Entry:
        """Return the entry of a tensor, or of the first of its parts."""
        return self._entries[parts_of(name)[0] if name in self._joint else name]

    def _read(self, entry: _Entry, index: tuple[slice, ...]) -> Tensor:
        bounds = [part.indices(size) for part, size in zip(index, entry.shape, strict=False)]
        asked = [slice(start, stop) for start, stop, _ in bounds]
        asked += [slice(0, size) for size in entry.shape[len(asked) :]]
        rows = [part for run in entry.runs if (part := self._read_run(run, asked)) is not None]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def close(self) -> None:
        """Close the files; a later read opens them again."""
        self._stored.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_run(self, run: _Run, asked: list[slice]) -> Tensor | None:
        """Return what is asked for of a run; None if it has none of it."""
        start, stop = max(asked[0].start, run.first), min(asked[0].stop, run.first + run.n_rows)
        if start >= stop:
            return None
        shift = run.row - run.first
        lead = [slice(place, place + 1) for place in run.part.lead]
        part = self._stored.read(self._prefix + run.part.key, *lead, slice(start + shift, stop + shift), *asked[1:])
        return part.reshape(part.shape[len(lead) :])

    def _match(self, shape: ModelShape) -> dict[str, _Entry]:
        """Return all Hugging Face tensors, and where they lie."""
        own = (key for key in self._stored.names if not (_OPTIMIZER.fullmatch(key) or self._is_of_other_part(key)))
        stored = {key.removeprefix(self._prefix) for key in own}
        if self._may_predict_further:
            stored = {key for key in stored if not key.startswith(_FURTHER)}
        found: dict[str, tuple[WeightMapping, Spelling]] = {}
        missing: set[str] = set()
        for mapping in _stored_mappings(shape, stored):
            way = next((way for way in spellings(mapping, shape) if way.keys <= stored), None)
            if way is not None:
                found[mapping.parameter] = mapping, way
            else:
                nearest = min(spellings(mapping, shape), key=lambda way: len(way.keys - stored))
                missing |= nearest.keys - stored
        used = {key for _, way in found.values() for key in way.keys}
        misfits = [line for mapping, way in found.values() for line in self._misfits(mapping, way)]
        unused = stored - used
        lines = [
            *strays("Tensors that no parameter uses", unused, missing),
            *strays("Tensors that are missing", missing, unused),
            *listed("Tensors of the wrong shape", len(set(misfits)), list(dict.fromkeys(misfits))),
        ]
        raise_if_any(
            f"the checkpoint in {self.folder} does not hold the model that config.json describes",
            lines,
            ["  both must be of one model: give the other folder of the two"] if lines else [],
        )
        return {name: entry for mapping, way in found.values() for name, entry in _entries(mapping, way).items()}

    def _is_of_other_part(self, key: str) -> bool:
        is_inside = self._prefix.endswith(_INSIDE) and not _OPTIMIZER.fullmatch(key)
        return is_inside and not key.startswith(self._prefix)

    def _misfits(self, mapping: WeightMapping, spelling: Spelling) -> Iterator[str]:
        """Yield a line for each tensor that does not have its shape; vocabularies may be padded to more rows."""
        for part in spelling.parts:
            shape = self._stored.shape(self._prefix + part.key)
            is_padded = isinstance(mapping, VocabParallel) and shape[1:] == part.shape[1:] and shape > part.shape
            if shape != part.shape and not is_padded:
                yield f"{part.key}: {list(shape)}, expected {list(part.shape)}"


def _common_prefix(keys: frozenset[str]) -> str:
    """Return the prefix of the parameters' keys: nothing, or names of what is around the model, such as `module.`."""
    ends = [key for key in keys if key.endswith(_EMBEDDING) and not _OPTIMIZER.fullmatch(key)]
    return min(ends, key=len, default=_EMBEDDING).removesuffix(_EMBEDDING)


def _stored_mappings(shape: ModelShape, stored: set[str]) -> Iterator[WeightMapping]:
    """Yield the mappings of all parameters that one process has, and of a tied output layer that is stored too."""
    yield from (mapping for mapping in stored_mappings(shape) if mapping.exists(_ONE_PROCESS))
    if shape.tied_embeddings and _OUTPUT in stored:
        yield mapping_of(_OUTPUT, WeightTensor(OUTPUT, (shape.vocab, shape.hidden), "vocabulary"))


def _entries(mapping: WeightMapping, spelling: Spelling) -> dict[str, _Entry]:
    """Return the Hugging Face tensors of a parameter."""
    firsts = [part.first for part in spelling.parts]
    runs: dict[str, list[_Run]] = {}
    for piece in mapping.pieces(_ONE_PROCESS):
        width = prod(piece.sizes[1:])
        row, end, hf_row = piece.start // width, piece.end // width, piece.offsets[0]
        while row < end:
            part = spelling.parts[bisect_right(firsts, row) - 1]
            n_rows = min(end, part.first + part.n_rows) - row
            runs.setdefault(piece.name, []).append(_Run(hf_row, n_rows, part, part.row + row - part.first))
            row, hf_row = row + n_rows, hf_row + n_rows
    return {name: _Entry(full, tuple(_merged(runs[name]))) for name, full in mapping.hf_shapes().items()}


def _merged(runs: list[_Run]) -> list[_Run]:
    """Return the runs of a tensor in its order, those that lie next to each other as one."""
    merged: list[_Run] = []
    for run in sorted(runs, key=lambda run: run.first):
        last = merged[-1] if merged else None
        is_next = last is not None and (last.part.key, last.part.lead) == (run.part.key, run.part.lead)
        if last is not None and is_next and last.row + last.n_rows == run.row:
            merged[-1] = replace(last, n_rows=last.n_rows + run.n_rows)
        else:
            merged.append(run)
    return merged
