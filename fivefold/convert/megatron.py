"""Megatron-Core checkpoints (`torch_dist`) from Hugging Face folders, and back, in one process on the CPU.

    Hugging Face folder ──fill: one parameter, or one expert of it──> chunk ──> checkpoint
    checkpoint ──read: one Hugging Face tensor──> Hugging Face folder

Either way every tensor of the source is used, every tensor of the model is written, and all of them are read back and
compared bit for bit before the folder gets its name. Never more than a tensor or two is in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from fivefold.bridge import folder_swap
from fivefold.bridge.audit import check_weights
from fivefold.bridge.bridge import check_tied_output
from fivefold.bridge.centred_norms import CentredNorms, centred_norms
from fivefold.bridge.decoder import expected_tensors, file_tensors
from fivefold.bridge.groups import ShardGroups
from fivefold.bridge.hf_reader import HFWeights, resolve_model_folder
from fivefold.bridge.hf_writer import copy_configs, copy_tokenizer, save_hf, tensor_specs
from fivefold.bridge.kept import check_kept
from fivefold.bridge.mapping import WeightMapping
from fivefold.bridge.megatron_names import Part, Spec, check_layers, check_spec, written_spelling
from fivefold.bridge.megatron_reader import MegatronWeights
from fivefold.bridge.reading import TensorReader, fill
from fivefold.bridge.separate_experts import SeparateExperts, stored_mappings
from fivefold.bridge.shard_plan import TensorSpec
from fivefold.bridge.weight_files import part_of_joint
from fivefold.convert.megatron_files import CheckpointFiles
from fivefold.convert.target import Progress, free_target, streamed, written_beside
from fivefold.families.read import load_shape
from fivefold.families.registry import find_family
from fivefold.families.shape import ModelShape
from fivefold.families.tensors import Shape
from fivefold.families.torch_dist import find_torch_dist

_ONE_PROCESS = ShardGroups()
_LINEAR = ("linear_", "in_proj", "out_proj")
"""How names of linear layers begin."""


@dataclass(frozen=True)
class Converted:
    """What a conversion has written."""

    shape: ModelShape
    n_tensors: int
    """Number of Hugging Face tensors; all were compared."""
    left_out: str | None
    """What the source held besides, and was not converted."""


def left_out(
    *, optimizer: bool = False, further_layers: bool, indexers: bool = False, other_parts: bool = False
) -> str | None:
    """Return in words what a conversion leaves out of what a source may hold."""
    held = {"the optimizer's state": optimizer, "layers for multi-token prediction": further_layers}
    held |= {"the indexers of sparse attention": indexers, "all but the language model": other_parts}
    return " and ".join(words for words, is_held in held.items() if is_held) or None


def has_further_layers(weights: HFWeights, shape: ModelShape) -> bool:
    """Return whether a Hugging Face folder holds layers for multi-token prediction in addition to `shape`."""
    family = find_family(shape.family)
    return any(family.is_further(name, shape.n_layers) for name in weights.names)


def convert_to_torch_dist(
    source: str | Path,
    out: str | Path,
    *,
    dtype: torch.dtype | None = None,
    spec: Spec = "te",
    stacked: bool = True,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Converted:
    """Write a Hugging Face model as a Megatron-Core checkpoint, with the model's config and tokenizer next to it.

    Args:
        source: the model's folder, hub name, or `package:<name>`.
        out: the folder to write. It appears when it is complete.
        dtype: dtype of the weights; None: as they are.
        spec: the layer spec of the models that will load the checkpoint, on which one name depends.
        stacked: write a parameter of all layers as one tensor, where the layers are alike. Megatron-Core wants that
            unless `moe_layer_freq` is a list or its layers are declared not homogeneous.
        overwrite: whether an earlier model folder at `out` may be replaced.
        progress: receives how far the conversion is.

    Raises:
        ValueError: no such model, one whose weights are not whole or that no engine trains, or something at `out`.
        OSError: the disk is full, or the file system refuses to write.
    """
    target, folder = free_target(out, overwrite=overwrite), resolve_model_folder(source)
    shape = load_shape(folder)
    check_layers(shape)
    check_spec(shape, spec)
    check_weights(folder, shape)
    is_alike = len(set(shape.layer_sorts)) == 1
    with HFWeights(folder) as weights, written_beside(target) as partial:
        if shape.tied_embeddings:
            check_tied_output(shape, weights)
        writer = _Writer(shape, weights, dtype, spec, stacked=stacked and is_alike)
        writer.write(partial, progress)
        copy_configs(partial, folder, writer.main_dtype)
        copy_tokenizer(partial, folder)
        for file in partial.iterdir():
            folder_swap.sync(file)
        with MegatronWeights(partial, shape) as written:
            n_tensors = _compare(shape, weights, written, progress)
        omitted = left_out(
            further_layers=has_further_layers(weights, shape),
            indexers=shape.indexer is not None,
            other_parts=shape.vision is not None,
        )
        return Converted(shape, n_tensors, omitted)


def convert_from_torch_dist(
    source: str | Path,
    out: str | Path,
    *,
    config: str | Path | None = None,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Converted:
    """Write a Megatron-Core checkpoint as a Hugging Face folder.

    Args:
        source: the checkpoint, or Megatron-LM's folder of several, whose newest is taken.
        out: the folder to write. It appears when it is complete.
        config: folder or hub name of the model with the checkpoint's config and tokenizer; None: they are in the
            checkpoint's folder, as `convert_to_torch_dist` leaves them.
        dtype: dtype of the weights; None: as they are.
        overwrite: whether an earlier model folder at `out` may be replaced.
        progress: receives how far the conversion is.

    Raises:
        ValueError: no such checkpoint, one that is not whole or holds another model, no config, or something at `out`.
        OSError: the disk is full, or the file system refuses to write.
    """
    target, checkpoint = free_target(out, overwrite=overwrite), find_torch_dist(source)
    described = _config_folder(checkpoint, config)
    shape = load_shape(described)
    check_kept(described, shape)
    with MegatronWeights(checkpoint, shape) as weights, written_beside(target) as partial:
        if shape.tied_embeddings:
            check_tied_output(shape, weights)
        tensors = (
            {name: TensorSpec(_dtype_of(name, weights), full) for name, full in file_tensors(shape).items()}
            if dtype is None
            else tensor_specs(shape, dtype)
        )
        save_hf(partial, streamed(weights, tensors, progress), described, tensors=tensors)
        with HFWeights(partial) as written:
            n_tensors = _compare(shape, weights, written, progress)
    omitted = left_out(
        optimizer=weights.has_optimizer,
        further_layers=weights.has_further_layers,
        other_parts=weights.has_other_parts,
    )
    return Converted(shape, n_tensors, omitted)


def _dtype_of(name: str, weights: MegatronWeights) -> torch.dtype:
    """Return the dtype of a tensor of files, which may be the one of all experts."""
    return weights.dtype(name if name in weights.names else part_of_joint(name, 0))


def _config_folder(checkpoint: Path, config: str | Path | None) -> Path:
    if config is not None:
        return resolve_model_folder(config)
    if not (checkpoint / "config.json").is_file():
        raise ValueError(
            f"{checkpoint} has no config.json, so that it does not say which model it holds: name that model's "
            "Hugging Face folder with --config"
        )
    return checkpoint


class _Writer:
    """Writes the weights of a model, one parameter or one expert at a time."""

    def __init__(
        self, shape: ModelShape, weights: HFWeights, dtype: torch.dtype | None, spec: Spec, *, stacked: bool
    ) -> None:
        self._weights = CentredNorms(SeparateExperts(weights, shape), shape, dtype)
        self._spec, self._has_wide_norms = spec, shape.wide_qk_norm
        self._centred = centred_norms(shape)
        self._parts = {
            mapping: written_spelling(mapping, shape, stacked=stacked, spec=spec).parts
            for mapping in stored_mappings(shape)
            if mapping.exists(_ONE_PROCESS)
        }
        self._dtypes = self._dtypes_by_key(dtype)

    @property
    def main_dtype(self) -> torch.dtype:
        """Dtype of most elements."""
        elements: dict[torch.dtype, int] = {}
        for parts in self._parts.values():
            for part in parts:
                dtype = self._dtypes[part.key]
                elements[dtype] = elements.get(dtype, 0) + part.n_elements
        return max(elements, key=lambda dtype: elements[dtype])

    def write(self, folder: Path, progress: Progress | None) -> None:
        """Write all tensors, and the objects that Megatron-Core wants with them."""
        total = sum(part.n_elements for parts in self._parts.values() for part in parts)
        done = 0
        with CheckpointFiles(folder) as files:
            for mapping, parts in self._parts.items():
                singles = list(_singles(mapping))
                n_own = len(parts) // len(singles)
                for number, single in enumerate(singles):
                    for part, chunk in self._chunks(single, parts[number * n_own : (number + 1) * n_own]):
                        offsets = (*part.lead, *(0,) * len(part.sizes))
                        files.add(part.key, part.shape, offsets, chunk.view((1,) * len(part.lead) + part.sizes))
                        done += chunk.numel()
                    if progress is not None:
                        progress("writing", done, total)
            for key in dict.fromkeys(self._state_keys()):
                files.add_empty_object(key)
            files.finish()

    def _chunks(self, mapping: WeightMapping, parts: Sequence[Part]) -> Iterator[tuple[Part, Tensor]]:
        """Yield what each tensor of the checkpoint gets of a parameter, or of one expert of it, with a part that says
        which tensor."""
        whole = torch.empty(mapping.local_shape(_ONE_PROCESS), dtype=self._dtypes[parts[0].key])
        fill(whole, mapping, self._weights, _ONE_PROCESS)
        if len(parts) == 1:
            yield parts[0], whole
            return
        rows = list(whole.split([part.n_rows for part in parts]))
        by_key: dict[str, list[tuple[int, int]]] = {}
        for number, part in enumerate(parts):
            by_key.setdefault(part.key, []).append((part.row, number))
        for places in by_key.values():
            numbers = [number for _, number in sorted(places)]
            yield parts[numbers[0]], torch.cat([rows[number] for number in numbers])

    def _dtypes_by_key(self, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
        """Return the dtype of each tensor: one that holds all that goes into it."""
        dtypes: dict[str, set[torch.dtype]] = {}
        for mapping, parts in self._parts.items():
            if dtype is not None and mapping.tensors[0].name not in self._centred:
                found = {torch.float32 if mapping.keeps_float32 else dtype}
            else:
                found = {self._weights.read(name, slice(0, 1)).dtype for name in mapping.sources()}
            for part in parts:
                dtypes.setdefault(part.key, set()).update(found)
        return {key: reduce(torch.promote_types, found) for key, found in dtypes.items()}

    def _state_keys(self) -> Iterator[str]:
        """Yield the keys of the objects that models of the spec have for the states of their modules."""
        for parts in self._parts.values():
            for part in parts:
                for name in self._modules_with_state(part.key):
                    yield f"{name}._extra_state/shard_{_dotted(part.lead, 0)}_{_dotted(part.lead_sizes, 1)}"

    def _modules_with_state(self, key: str) -> Iterator[str]:
        """Yield the modules that Megatron-Core saves a state of where it saves the tensor `key`."""
        module, weight, _ = key.partition(".weight")
        name = module.rpartition(".")[2]
        is_norm = name.endswith("norm") and not (self._has_wide_norms and name in ("q_layernorm", "k_layernorm"))
        if weight and (name.startswith(_LINEAR) or (self._spec == "te" and is_norm)):
            yield module
        if self._spec == "te" and name == "linear_proj":
            yield module.removesuffix("linear_proj") + "core_attention"


def _dotted(numbers: tuple[int, ...], otherwise: int) -> str:
    return ".".join(map(str, numbers or (otherwise,)))


def _singles(mapping: WeightMapping) -> Iterator[WeightMapping]:
    """Yield the mappings of the single experts of a parameter; the mapping itself if it has none."""
    n_experts = mapping.tensors[0].n_experts
    if n_experts is None:
        yield mapping
        return
    for expert in range(n_experts):
        own = (replace(tensor, name=tensor.name.format(expert=expert), n_experts=1) for tensor in mapping.tensors)
        yield replace(mapping, tensors=tuple(own))


def _compare(shape: ModelShape, source: TensorReader, written: TensorReader, progress: Progress | None) -> int:
    """Read every tensor back, and return how many there are.

    Raises:
        ValueError: one is not, bit for bit, what was to be written.
    """
    tensors: dict[str, Shape] = expected_tensors(shape)
    done, total = 0, sum(map(prod, tensors.values()))
    for name, full in tensors.items():
        stored = written.read(name)
        # As integers, because NaN differs from itself.
        if not torch.equal(*(_bits(tensor) for tensor in (source.read(name).to(stored.dtype), stored))):
            raise ValueError(
                f"{name} was read back from {written.folder / written.file(name)} with other values than were written: "
                "memory or disk of this machine is not to be trusted, or another program writes there"
            )
        done += prod(full)
        if progress is not None:
            progress("verifying", done, total)
    return len(tensors)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)
