"""The export of a model: shards become full tensors, in buckets, by collectives.

    shard ──all-gather over ETP, TP──> ──all-gather over EP──> [n, *local shape] ──broadcast over PP──> readers

Parameters travel in buckets, because most are small and every collective costs a round trip: the parameters of one
pipeline stage and one dtype, one after the other in the model's order, up to a number of bytes. The experts of a layer
travel in slices of that size. Ranks whose result nobody reads take part in nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.bridge.audit import check_model
from fivefold.bridge.groups import ShardGroups
from fivefold.bridge.mapping import Domain, WeightMapping
from fivefold.bridge.participants import find_part
from fivefold.families.tensors import Shape
from fivefold.weights.stream import Stack

# torch 2.11 knows only the second name; later versions deprecate it.
_all_gather_single = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
Merge = Callable[[Tensor, int], Tensor]
"""Adds adapters to a shard of a parameter, or to some of its experts from a number on."""
Rows = Callable[[str, Tensor, int, int], Tensor]
"""Returns rows of a parameter on its device: its name, the parameter, the first row, and their number."""
_DOMAINS: tuple[Domain, ...] = ("replicated", "tensor", "expert")


@dataclass(frozen=True)
class Item:
    """One parameter on its way to the ranks that read it, or some of the experts of one."""

    mapping: WeightMapping
    stage: int
    """Pipeline stage that owns it."""
    shape: Shape
    """Shape of what travels of one shard."""
    dtype: torch.dtype
    n_shards: int
    """Ranks of one stage over which it is cut."""
    first: int = 0
    """Index in the shard's first dimension at which it begins."""
    merge: Merge | None = None
    """Adds the adapters of the parameter before it travels; None: it has none."""

    @property
    def nbytes(self) -> int:
        """Size of all shards together."""
        return self.n_shards * prod(self.shape) * self.dtype.itemsize

    def slices(self, max_bytes: int) -> Iterator[Item]:
        """Yield it in parts of at most `max_bytes`, of one expert of each rank at least.

        It is whole without experts, and where files have all experts in one tensor.
        """
        if self.mapping.domain != "expert" or self.mapping.is_joint:
            yield self
            return
        count = self.shape[0]
        step = max(1, count * max_bytes // self.nbytes)
        for first in range(0, count, step):
            yield replace(self, shape=(min(step, count - first), *self.shape[1:]), first=first)

    def merged(self, shards: Tensor) -> Iterator[Stack]:
        """Yield the full Hugging Face tensors of its shards, [n_shards, *shape]."""
        yield from self.mapping.merged(shards, self.first)


class Export:
    """Yields every Hugging Face tensor of a model, each time that it is iterated over; see `Bridge.export`.

    All ranks build it together, which takes a few collectives, and iterate over it together.

    Args:
        mappings: the mappings of the whole model.
        tensors: this rank's tensors by the parameters' names.
        groups: this rank's place.
        dtype: what tensors are converted to before they are sent; None leaves them as they are.
        readers: the ranks that read the tensors; None: all.
        rows: what reads rows of a tensor.
        bucket_bytes: most bytes of full tensors that exist at one time, unless one parameter is larger.
        merging: what merges the adapters of a parameter into it, by the parameter's name.
        device: where shards are gathered; None: where `tensors` are.
    """

    def __init__(
        self,
        mappings: Mapping[str, WeightMapping],
        tensors: Mapping[str, Tensor],
        groups: ShardGroups,
        *,
        dtype: torch.dtype | None,
        readers: frozenset[int] | None,
        rows: Rows,
        bucket_bytes: int,
        merging: Mapping[str, Merge],
        device: torch.device | None = None,
    ) -> None:
        self._device = next(iter(tensors.values())).device if device is None else device
        self._tensors, self._groups, self._rows = tensors, groups, rows
        self._part = find_part(groups, readers)
        specs = {name: (tuple(tensor.shape), dtype or tensor.dtype) for name, tensor in tensors.items()}
        stages = over_stages(specs, groups)
        check_model(mappings, [{name: shape for name, (shape, _) in stage.items()} for stage in stages], groups)
        plan: list[Item] = []
        for name, mapping in mappings.items():
            if mapping.hf_shapes():
                owner = next(number for number, stage in enumerate(stages) if name in stage)
                shape, shard_dtype = stages[owner][name]
                item = Item(mapping, owner, shape, shard_dtype, mapping.n_shards(groups), merge=merging.get(name))
                plan += item.slices(bucket_bytes)
        self._buckets = list(buckets(plan, bucket_bytes))

    def __iter__(self) -> Iterator[Stack]:
        for bucket in self._buckets:
            for item, shards in zip(bucket, self._gathered(bucket), strict=True):
                for stack in item.merged(shards):
                    yield Stack(stack.names, stack.tensors.contiguous())

    def _gathered(self, bucket: Sequence[Item]) -> list[Tensor]:
        """Return the shards of every item, of one stage and dtype; on ranks that do not read them, without content.

        They are [n_shards, *shape] each.
        """
        groups, part = self._groups, self._part
        if groups.pp_size == 1 and all(item.n_shards == 1 for item in bucket):
            return [self._local(item).unsqueeze(0) if part.reads else _outline(item) for item in bucket]
        is_owner = bucket[0].stage == groups.pp_rank
        shards: dict[int, Tensor] = {}
        if part.holds or (is_owner and (part.tensor or part.etp)):
            buffer = torch.empty(sum(item.nbytes for item in bucket), dtype=torch.uint8, device=self._device)
            start = 0
            for domain in _DOMAINS:
                places = [place for place, item in enumerate(bucket) if item.mapping.domain == domain]
                if not places:
                    continue
                items = [bucket[place] for place in places]
                end = start + sum(item.nbytes for item in items)
                region = buffer[start:end].view(items[0].dtype).view(items[0].n_shards, -1)
                if is_owner:
                    self._gather_domain(region, items)
                parts = torch.split(region, [prod(item.shape) for item in items], dim=1)
                shards.update(zip(places, parts, strict=True))
                start = end
            if groups.pp_size > 1 and part.holds:
                dist.broadcast(buffer, group=groups.pp_group, group_src=bucket[0].stage)
        return [
            shards[place].view(item.n_shards, *item.shape) if part.reads else _outline(item)
            for place, item in enumerate(bucket)
        ]

    def _local(self, item: Item) -> Tensor:
        name = item.mapping.parameter
        shard = self._rows(name, self._tensors[name], item.first, item.shape[0])
        return (shard if item.merge is None else item.merge(shard, item.first)).to(item.dtype)

    def _gather_domain(self, region: Tensor, items: Sequence[Item]) -> None:
        """Fill `region` [n_shards, elements] with the shards of items of one domain, as far as this rank takes part."""
        groups, part, domain = self._groups, self._part, items[0].mapping.domain
        takes_part = {"replicated": part.holds, "tensor": part.tensor, "expert": part.etp}[domain]
        if not takes_part:
            return
        local = torch.cat([self._local(item).flatten() for item in items])
        if domain == "tensor" and groups.tp_size > 1:
            all_gather(region, local, groups.tp_group)
            return
        if domain == "expert" and groups.etp_size > 1:
            expert_shards = region if groups.ep_size == 1 else local.new_empty(groups.etp_size, local.numel())
            all_gather(expert_shards, local, groups.etp_group)
            local = expert_shards
        if domain == "expert" and groups.ep_size > 1:
            if part.ep:
                all_gather(region, local, groups.ep_group)
        elif local is not region:
            region.copy_(local)


def rows_of(name: str, tensor: Tensor, first: int, count: int) -> Tensor:
    """Return rows of a tensor that is on its device."""
    return tensor.detach()[first : first + count]


def over_stages(value: Any, groups: ShardGroups) -> list[Any]:
    """Return the `value` of every pipeline stage, in order, on every rank. It may be anything that pickles."""
    if groups.pp_size == 1:
        return [value]
    values: list[Any] = [None] * groups.pp_size
    dist.all_gather_object(values, value, group=groups.pp_group)
    return values


def buckets(items: Sequence[Item], max_bytes: int) -> Iterator[list[Item]]:
    """Yield runs of items of one stage and dtype, of at most `max_bytes` together; a larger item travels alone."""
    bucket: list[Item] = []
    size = 0
    for item in items:
        if bucket and (
            (item.stage, item.dtype) != (bucket[0].stage, bucket[0].dtype) or size + item.nbytes > max_bytes
        ):
            yield bucket
            bucket, size = [], 0
        bucket.append(item)
        size += item.nbytes
    if bucket:
        yield bucket


def _outline(item: Item) -> Tensor:
    """Return shards of an item without content."""
    return torch.empty((item.n_shards, *item.shape), dtype=item.dtype, device="meta")


def all_gather(out: Tensor, local: Tensor, group: dist.ProcessGroup | None) -> None:
    """Gather contiguous tensors of any dtype, one after the other, into `out`."""
    # As bytes: not every backend takes every dtype, and bytes arrive bit for bit.
    _all_gather_single(out.view(-1).view(torch.uint8), local.view(-1).view(torch.uint8), group=group)
