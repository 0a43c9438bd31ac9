"""This rank's shards of a model's parameters, and the Hugging Face tensors that they are parts of.

    Hugging Face tensors ──mapping──> parameter of this tensor-parallel rank ──rows──> shard of this rank

A shard is a flat range of the parameter, because FSDP cuts along the first dimension; experts are cut by rows. Others
see weights with adapters merged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fivefold.bridge.adapters import WithAdapters
from fivefold.bridge.audit import check_model
from fivefold.bridge.bridge import LOADING, checked_source, not_finite_weights
from fivefold.bridge.export import all_gather
from fivefold.bridge.finite import is_finite
from fivefold.bridge.hf_saver import Block, blocks
from fivefold.bridge.mapping import WeightMapping
from fivefold.bridge.parameters import Parameter, Parameters
from fivefold.bridge.reading import TensorReader, fill_range
from fivefold.families.shape import ModelShape
from fivefold.families.tensors import Shape
from fivefold.fsdp.experts import name_in_transformers, shape_in_transformers
from fivefold.fsdp.groups import Groups
from fivefold.fsdp.merging import Addition, additions, merged
from fivefold.observe.progress import counting
from fivefold.weights.stream import Stack, alone, unstacked
from fivefold.weights.transport import GATHER_BYTES


@dataclass(frozen=True, eq=False)
class Shard(Parameter):
    """This rank's rows of one parameter, which is a DTensor, whole over the ranks that FSDP shards it over."""

    shape: Shape = ()
    """Shape of the whole parameter of this tensor-parallel rank, in which experts have their own dimension."""
    padded: int = 0
    """Elements of the largest shard of any rank."""

    @property
    def values_N(self) -> Tensor:
        """The shard's elements, flat, as a view."""
        return local_elements(self.tensor)

    def with_additions(self, added: list[Addition] | None) -> Tensor:
        """Return the elements with what adapters add, flat; as a view, if they add nothing."""
        return merged(self.values_N, self.begin, added) if added else self.values_N


def local_elements(tensor: Tensor) -> Tensor:
    """Return this rank's elements of a DTensor, flat, as a view."""
    assert isinstance(tensor, DTensor)
    return tensor.to_local().detach().view(-1)


class Shards:
    """All shards of this rank, in the model's order. All ranks of the model call each method together."""

    def __init__(
        self,
        model: nn.Module,
        shape: ModelShape,
        mappings: Mapping[str, WeightMapping],
        trained: frozenset[str],
        groups: Groups,
        seed: int,
    ) -> None:
        """Take the parameters of a model that is sharded, and the offsets of its routers.

        Args:
            model: the model.
            shape: its shape.
            mappings: the mapping of each parameter by its name in memory, in the model's order.
            trained: names of the parameters that are trained.
            groups: the groups of this process.
            seed: seed of new adapters.

        Raises:
            WeightMismatchError: the mappings do not fit the model's parameters.
        """
        self._shape = shape
        self._groups = groups
        self._seed = seed
        tensors = {name_in_transformers(name): parameter for name, parameter in model.named_parameters()}
        shapes = {
            name_in_transformers(name): shape_in_transformers(name, tuple(parameter.shape), shape.n_experts)
            for name, parameter in model.named_parameters()
        }
        sharded = {name: mapping for name, mapping in mappings.items() if not mapping.keeps_float32}
        check_model(sharded, [shapes], groups.weights)
        buffers = dict(model.named_buffers())
        is_first = groups.shard.rank() == 0
        self._shards = [
            self._shard(mapping, tensors[name], shapes[name], name in trained) for name, mapping in sharded.items()
        ]
        self._weights = [shard for shard in self if not shard.mapping.is_adapter]
        self._adapters: dict[str, list[Shard]] = {}
        """The matrices of adapters by the name of the weight, or of all experts' weights."""
        for shard in self:
            if (adapted := shard.mapping.tensors[0].adapts) is not None:
                self._adapters.setdefault(adapted, []).append(shard)
        self._offsets = [
            # Every rank has them whole, and FSDP does not know of them.
            Parameter(mapping, buffers[name], is_trained=name in trained, is_stored=is_first)
            for name, mapping in mappings.items()
            if mapping.keeps_float32
        ]
        self.parameters = Parameters[Parameter]([*self._shards, *self._offsets], mappings, trained, groups.weights)

    def _shard(self, mapping: WeightMapping, tensor: Tensor, shape: Shape, is_trained: bool) -> Shard:
        rows = -(-tensor.shape[0] // self._groups.shard.size())
        first = min(rows * self._groups.shard.rank(), tensor.shape[0])
        width = prod(tensor.shape[1:])
        return Shard(mapping, tensor, is_trained, is_stored=True, begin=first * width, shape=shape, padded=rows * width)

    def __iter__(self) -> Iterator[Shard]:
        return iter(self._shards)

    @torch.no_grad()
    def load(self, source: TensorReader) -> None:
        """Fill the shards from `source`, each in its own dtype and on its own device.

        A value head begins at 0 if `source` lacks it.

        Raises:
            WeightMismatchError: tensors that are missing or unused, or that have another shape.
            ValueError: on every rank that reads one, naming the tensors that hold NaN or infinite values.
        """
        source = checked_source(self._shape, source)
        if self._shape.adapters is not None:
            source = WithAdapters(source, self._shape, self._seed)
        suspects: dict[str, torch.dtype] = {}
        with counting(LOADING, sum(parameter.values_N.nbytes for parameter in self.parameters)) as count:
            for parameter in self.parameters:
                mapping, values_N = parameter.mapping, parameter.values_N
                fill_range(values_N, parameter.begin, mapping, source, self._groups.weights)
                if values_N.numel() > 0 and not is_finite(values_N):
                    suspects |= dict.fromkeys(mapping.sources(), values_N.dtype)
                count(values_N.nbytes)
        if suspects:
            raise not_finite_weights(suspects, source)

    def blocks(self, dtype: torch.dtype) -> Iterator[Block]:
        """Return the blocks of Hugging Face tensors that this rank writes to files. All ranks call this together.

        Adapters are gathered before a file is written, so that no rank waits for one that cannot write.
        """
        added = {shard.name: self._additions(shard, dtype) for shard in self._weights}
        return chain(self._blocks(self._weights, dtype, added), self._offset_blocks())

    def adapter_blocks(self, dtype: torch.dtype) -> Iterator[Block]:
        """Return the blocks of the adapters that this rank writes to files."""
        return self._blocks((shard for own in self._adapters.values() for shard in own), dtype, {})

    def _blocks(
        self, shards: Iterable[Shard], dtype: torch.dtype, added: Mapping[str, list[Addition]]
    ) -> Iterator[Block]:
        for shard in shards:
            values_N = shard.with_additions(added.get(shard.name))
            for cut in shard.cuts(shard.mapping.stored_pieces(self._groups.weights)):
                for block in blocks(cut, dtype.itemsize):
                    yield block, block.view(values_N, shard.begin).to(dtype)

    def _offset_blocks(self) -> Iterator[Block]:
        for offsets in self._offsets:
            if offsets.is_stored:
                for piece in offsets.mapping.stored_pieces(self._groups.weights):
                    yield piece, piece.view(offsets.values_N)

    def _additions(self, shard: Shard, dtype: torch.dtype) -> list[Addition]:
        """Return what adapters, in the dtype of passes, add to a shard. All ranks call this together."""
        own = [matrix for tensor in shard.mapping.tensors for matrix in self._adapters.get(tensor.name, ())]
        if not own or self._shape.adapters is None:
            return []
        gathered = zip(own, self._gather(own, dtype), strict=True)
        matrices = dict(unstacked(stack for matrix, whole in gathered for stack in matrix.mapping.merge(whole)))
        pieces = shard.cuts(shard.mapping.pieces(self._groups.weights))
        return list(additions(pieces, matrices, self._shape.adapters))

    def export(self, dtype: torch.dtype, readers: frozenset[int] | None) -> Iterator[Stack]:
        """Yield every Hugging Face tensor, whole, on the ranks that read them; on the others, outlines on `meta`.

        Args:
            dtype: what the tensors are converted to before they are sent; offsets stay float32.
            readers: the ranks that read the tensors; None: all.
        """
        reads = readers is None or dist.get_rank() in readers
        yield from self._export(self._weights, dtype, reads=reads)
        for offsets in self._offsets:
            for stack in offsets.mapping.merge(offsets.values_N.unsqueeze(0)):
                yield stack if reads else Stack(stack.names, stack.tensors.to("meta"))

    def export_adapters(self, dtype: torch.dtype, readers: frozenset[int] | None) -> Iterator[Stack]:
        """Yield every matrix of the adapters, as `export` yields weights."""
        own = [shard for shards in self._adapters.values() for shard in shards]
        yield from self._export(own, dtype, reads=readers is None or dist.get_rank() in readers)

    def _export(self, shards: Iterable[Shard], dtype: torch.dtype, *, reads: bool) -> Iterator[Stack]:
        for bucket in self._buckets(shards, dtype):
            for shard, whole in zip(bucket, self._gather(bucket, dtype), strict=True):
                if reads:
                    for stack in shard.mapping.merged(whole):
                        yield Stack(stack.names, stack.tensors.contiguous())
                else:
                    for name, shape in shard.mapping.file_shapes().items():
                        yield alone(name, torch.empty(shape, dtype=dtype, device="meta"))

    def _buckets(self, shards: Iterable[Shard], dtype: torch.dtype) -> Iterator[list[Shard]]:
        """Yield runs of shards whose wholes have at most `GATHER_BYTES` together; a larger one travels alone."""
        bucket: list[Shard] = []
        size = 0
        for shard in shards:
            n_bytes = prod(shard.shape) * dtype.itemsize * shard.mapping.n_shards(self._groups.weights)
            if bucket and size + n_bytes > GATHER_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(shard)
            size += n_bytes
        if bucket:
            yield bucket

    def _gather(self, bucket: list[Shard], dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield the parameters of all tensor-parallel ranks that have other parts, merged, [n, *shape] each."""
        own = [(shard, shard.with_additions(self._additions(shard, dtype)).to(dtype)) for shard in bucket]
        padded = [torch.nn.functional.pad(values_N, (0, s.padded - values_N.numel())) for s, values_N in own]
        gathered = _gathered(torch.cat(padded), self._groups.shard)
        for shard, rows in zip(bucket, gathered.split([shard.padded for shard in bucket], dim=1), strict=True):
            whole = rows.reshape(-1)[: prod(shard.shape)]
            if shard.mapping.n_shards(self._groups.weights) > 1:
                yield _gathered(whole, self._groups.tp).view(-1, *shard.shape)
            else:
                yield whole.view(1, *shard.shape)


def _gathered(local_N: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tensors of all ranks of a group, [ranks, N]."""
    if group.size() == 1:
        return local_N.unsqueeze(0)
    everywhere = local_N.new_empty(group.size(), local_N.numel())
    all_gather(everywhere, local_N, group)
    return everywhere
