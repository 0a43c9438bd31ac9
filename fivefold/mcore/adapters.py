"""Low-rank adapters next to Megatron-Core's linear layers and to the experts.

    x ──W (frozen)─────────────┐
    └──A──> [T, rank] ──B──*scale──+──> y

    layer is cut by     A                       B                       between them
    rows (outputs)      whole                   rows                    gather of the tokens, or a sum of gradients
    columns (inputs)    columns                 whole                   sum over ranks, scattered over tokens
    not at all          whole                   whole                   nothing

A layer that holds several weights of a Hugging Face model, such as q, k and v, has an adapter for each.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn

from fivefold.bridge.export import Merge
from fivefold.bridge.groups import ShardGroups
from fivefold.bridge.mapping import Column, ExpertWhole, WeightMapping
from fivefold.engine.adapters import Switch
from fivefold.engine.context_parallel import copy_to_group
from fivefold.engine.kernels.matmul import padded_rank
from fivefold.families.adapters import MATRICES, AdapterShape, layer_of
from fivefold.families.tensors import Cut
from fivefold.mcore.layers import GroupedExperts
from fivefold.mcore.model import Decoder
from fivefold.mcore.tensor_names import global_name

if TYPE_CHECKING:
    from fivefold.engine.dropout import Dropout, Stream

_ADAPTER = re.compile(r"(?P<module>.+)\.adapters\.(?P<layer>\w+)\.(?P<matrix>[AB])")


class Adapter(nn.Module):
    """The adapter of one weight, as far as this rank holds it."""

    def __init__(self, a: nn.Parameter, b: nn.Parameter, scale: float) -> None:
        super().__init__()
        self.A, self.B, self.scale = a, b, scale

    def delta(self, experts: slice) -> Tensor:
        """Return what it adds to this rank's part of the weight, float32 [out, in]; of some experts [n, out, in]."""
        a, b = (matrix[experts] if matrix.ndim == 3 else matrix for matrix in (self.A, self.B))
        return self.scale * (b.float() @ a.float())


class Adapters:
    """The adapters of the weights in one parameter of a layer."""

    def __init__(
        self,
        cut: Cut,
        widths: Mapping[str, tuple[int, ...]],
        n_units: int,
        adapters: Mapping[str, Adapter],
        switch: Switch,
    ) -> None:
        """Take the adapters.

        Args:
            cut: how tensor parallelism cuts the weights.
            widths: outputs on this rank of each weight in the parameter, by the name of its layer, in their order; of
                a weight that is several runs of rows, of each run.
            n_units: equal parts of each run's outputs, which lie side by side (`bridge.mapping.Column`).
            adapters: the adapters by the same names.
            switch: whether they add anything to what their layer computes.
        """
        self._cut, self._widths, self._n_units = cut, widths, n_units
        self._adapters = {name: adapters[name] for name in widths if name in adapters}
        self._switch = switch

    @torch.no_grad()
    def merged(self, weight: Tensor, first: int) -> Tensor:
        """Return this rank's parameter with what they add, in its own dtype.

        Args:
            weight: the parameter; or of experts, [n, out, in], those from number `first` on.
            first: number of the first expert.
        """
        experts = slice(first, first + len(weight))
        parts = {name: adapter.delta(experts) for name, adapter in self._adapters.items()}
        return (weight.float() + self._arranged(parts, weight.ndim - 2)).to(weight.dtype)

    def _arranged(self, parts: Mapping[str, Tensor], dim: int) -> Tensor:
        """Return outputs of the weights, along `dim`, as the parameter has them; 0 of a weight without an adapter."""
        like, runs = next(iter(parts.values())), list[Tensor]()
        for name, widths in self._widths.items():
            zeros = (*like.shape[:dim], sum(widths), *like.shape[dim + 1 :])
            runs += (parts[name] if name in parts else like.new_zeros(zeros)).split(widths, dim)
        if len(runs) == 1:
            return like
        return torch.cat([run.unflatten(dim, (self._n_units, -1)) for run in runs], dim=dim + 1).flatten(dim, dim + 1)


class LinearAdapters(Adapters):
    """Adapters of a linear layer of Megatron-Core, to whose output they add."""

    def attach(self, linear: Any) -> None:
        """Add to the output of a layer from now on."""
        self._over_tokens = is_over_tokens(linear)
        self._stream: Stream = "rank" if self._over_tokens or self._cut == "columns" else "tensor"
        self._copies = not getattr(linear, "disable_grad_reduce", False)
        linear.register_forward_hook(self._add)

    def _add(self, linear: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> Any:
        if not self._switch.is_on:
            return output
        added = self._of(inputs[0])
        return (output[0] + added, *output[1:]) if isinstance(output, tuple) else output + added

    def _of(self, x: Tensor) -> Tensor:
        """Return what is added to the output for an input [T, 1, in]."""
        ups: list[Tensor] = [adapter.A for adapter in self._adapters.values()]
        if self._switch.drops:
            # Each adapter drops inputs by itself.
            low = torch.cat([F.linear(self._switch.input(x, self._stream), up) for up in ups], dim=-1)
        else:
            low = F.linear(x, torch.cat(ups))
        lows = self._between(low).split([len(up) for up in ups], dim=-1)
        parts = {
            name: F.linear(own, adapter.B) * adapter.scale
            for (name, adapter), own in zip(self._adapters.items(), lows, strict=True)
        }
        return self._arranged(parts, x.ndim - 1)

    def _between(self, low: Tensor) -> Tensor:
        """Exchange [T, 1, ranks] between the ranks of tensor parallelism."""
        moved = low
        if self._cut == "rows":
            if self._over_tokens:
                moved = gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True)
            elif self._copies:
                moved = copy_to_tensor_model_parallel_region(low)
        elif self._cut == "columns":
            if self._over_tokens:
                moved = reduce_scatter_to_sequence_parallel_region(low)
            else:
                moved = reduce_from_tensor_model_parallel_region(low)
        return moved


class ExpertAdapters(Adapters):
    """Adapters of one parameter of all experts of a layer."""

    def attach(self, experts: GroupedExperts, kind: str) -> None:
        """Add to the products with the experts' weight `kind` from now on."""
        self._experts = experts
        experts.additions[kind] = self.added

    def merged(self, weight: Tensor, first: int) -> Tensor:
        if not self._experts.is_transposed:
            return super().merged(weight, first)
        return super().merged(weight.transpose(1, 2), first).transpose(1, 2)

    def added(self, output: Tensor, rows: Tensor, groups: Any) -> Tensor:
        """Return the products [N, out] of rows [N, in], sorted by expert, with what the adapters add."""
        if not self._switch.is_on:
            return output
        adapters, is_a_whole = list(self._adapters.items()), self._cut == "rows"
        ups = [padded_rank(self._summed(each.A) if is_a_whole else each.A, -2) for _, each in adapters]
        if self._switch.drops:
            stream: Stream = "expert" if is_a_whole else "rank"
            lows = [self._multiply(self._switch.input(rows, stream), up, groups) for up in ups]
        else:
            lows = list(self._multiply(rows, torch.cat(ups, dim=-2), groups).chunk(len(ups), dim=-1))
        parts = {
            name: self._multiply(
                own.contiguous(), padded_rank(each.B if is_a_whole else self._summed(each.B), -1), groups
            )
            * each.scale
            for (name, each), own in zip(adapters, lows, strict=True)
        }
        return output + self._arranged(parts, 1)

    def _summed(self, whole: Tensor) -> Tensor:
        """Return a matrix that is whole on ranks with different parts of an expert, each with a part of its gradient.

        The gradient of one that all experts share is summed over all ranks of the stage, as in dense layers.
        """
        return whole if whole.ndim == 2 else copy_to_group(whole, self._experts.etp_group)

    def _multiply(self, rows: Tensor, matrix: Tensor, groups: Any) -> Tensor:
        """Return rows [N, in] times the transposes of their experts' [E, out, in], or of one matrix for all."""
        if matrix.ndim == 2:
            return F.linear(rows, matrix)
        return self._experts.multiply(rows, matrix.transpose(1, 2) if self._experts.is_transposed else matrix, groups)


def tracked_dropout(rate: float, seed: int, groups: ShardGroups) -> Dropout:
    """Return the dropout of a model's adapters, whose random numbers Megatron-Core tracks: it sets them back where it
    recomputes, and they are saved with its own.
    """
    from fivefold.engine.dropout import Dropout

    sharers: dict[Stream, Any] = {"rank": None, "tensor": groups.tp_group, "expert": groups.etp_group}
    return Dropout(rate, seed, sharers, get_cuda_rng_tracker())


def is_over_tokens(linear: Any) -> bool:
    """Return whether a layer's tokens are divided over the ranks of tensor parallelism (sequence parallelism)."""
    return bool(getattr(linear, "sequence_parallel", False) or getattr(linear.weight, "sequence_parallel", False))


def install_adapters(
    chunks: Iterable[Decoder],
    mappings: Mapping[str, WeightMapping],
    shape: AdapterShape,
    groups: ShardGroups,
    switch: Switch,
) -> dict[str, Merge]:
    """Add the adapters of `mappings` to the chunks' layers; the bridge fills them.

    Args:
        chunks: this rank's decoders.
        mappings: the mappings of the whole model, by parameter.
        shape: the adapters.
        groups: this rank's place.
        switch: whether they add anything to what their layers compute.

    Returns:
        What merges the adapters of a parameter into it, by the parameter's name.
    """
    parts: dict[str, dict[str, WeightMapping]] = {}
    for name, mapping in mappings.items():
        if mapping.is_adapter and (match := _ADAPTER.fullmatch(name)):
            parts.setdefault(f"{match['module']}.{match['layer']}", {})[match["matrix"]] = mapping
    found: dict[str, Merge] = {}
    for chunk in chunks:
        for local, _ in list(chunk.named_parameters()):
            path, _, kind = local.rpartition(".")
            mapping = mappings[global_name(chunk, local)]
            if (
                adapters := _install(chunk.get_submodule(path), kind, mapping, parts, shape, groups, switch)
            ) is not None:
                found[mapping.parameter] = adapters.merged
    return found


def _install(
    module: Any,
    kind: str,
    weight: WeightMapping,
    parts: Mapping[str, Mapping[str, WeightMapping]],
    shape: AdapterShape,
    groups: ShardGroups,
    switch: Switch,
) -> Adapters | None:
    """Add the adapters of one parameter of a layer, and return them; None: there are none."""
    path = weight.parameter.rpartition(".")[0]
    widths, adapters = dict[str, tuple[int, ...]](), dict[str, Adapter]()
    n_ranks = groups.etp_size if weight.domain == "expert" else groups.tp_size
    like = getattr(module, kind)
    for tensor in weight.tensors:
        layer = layer_of(tensor.name)
        if layer is None:
            continue
        outputs, _, cut = tensor.as_linear
        widths[layer] = tuple(rows // (n_ranks if cut == "rows" else 1) for rows in tensor.runs or (outputs,))
        if own := parts.get(f"{path}.{layer}"):
            a, b = (_parameter(own[matrix], like, module, groups) for matrix in MATRICES)
            adapters[layer] = Adapter(a, b, shape.scale(own["A"].tensors[0].shape[0]))
    if not adapters:
        return None
    if not hasattr(module, "adapters"):
        module.adapters = nn.ModuleDict()
    module.adapters.update(adapters)
    if isinstance(module, GroupedExperts):
        of_experts = ExpertAdapters(cut, widths, 1, adapters, switch)
        of_experts.attach(module, kind)
        return of_experts
    n_units = weight.n_units // groups.tp_size if isinstance(weight, Column) and weight.n_units else 1
    of_linear = LinearAdapters(cut, widths, n_units, adapters, switch)
    of_linear.attach(module)
    return of_linear


def _parameter(mapping: WeightMapping, like: Tensor, module: Any, groups: ShardGroups) -> nn.Parameter:
    """Return a matrix, whose gradient Megatron-Core reduces, and counts once in the norm, by its attributes."""
    matrix = nn.Parameter(torch.empty(mapping.local_shape(groups), dtype=like.dtype, device=like.device))
    attributes = vars(matrix)
    if mapping.domain == "expert":
        set_tensor_model_parallel_attributes(matrix, is_parallel=True, dim=1, stride=1)
        attributes["allreduce"] = False
        # The norm counts it on the first of the ranks that have it whole.
        attributes["shared"] = isinstance(mapping, ExpertWhole) and groups.etp_rank > 0
    elif mapping.domain == "tensor":
        set_tensor_model_parallel_attributes(matrix, is_parallel=True, dim=0, stride=1)
    else:
        # Each rank has seen a part of the tokens, or has a part of the outputs or of the experts.
        attributes["sequence_parallel"] = (
            isinstance(module, GroupedExperts)
            or is_over_tokens(module)
            or getattr(module, "disable_grad_reduce", False)
        )
    return matrix
