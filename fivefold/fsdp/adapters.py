"""Low-rank adapters in the linear layers and the experts of a transformers model.

    q_proj     ──hook──> W x + scale * lora_B(lora_A(x))
    experts    ──another forward pass──> the same of every expert's rows, [experts, rank, in] and [experts, out, rank]

Tensor parallelism cuts A as it cuts a weight's inputs, and B as its outputs. A matrix that is whole on all ranks sees
some heads or columns on each, so each has a part of its gradient, which the optimizer sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.bridge.mapping import WeightMapping
from fivefold.engine.adapters import Switch
from fivefold.engine.kernels.matmul import grouped_mm, padded_rank
from fivefold.families.adapters import AdapterShape, adapter_name, layer_of
from fivefold.fsdp.mappings import expert_adapter

if TYPE_CHECKING:
    from fivefold.engine.dropout import Stream


class ExpertAdapter(nn.Module):
    """The adapters of one weight of all experts: A [experts, rank, in] and B [experts, out, rank].

    One of the two may be shared by the experts, and then has no first dimension.
    """

    def __init__(self, scale: float, stream: Stream, switch: Switch) -> None:
        super().__init__()
        # The mappings give all parameters of the model their shapes.
        self.A = nn.Parameter(torch.empty(0))
        self.B = nn.Parameter(torch.empty(0))
        self._scale, self._stream, self._switch = scale, stream, switch

    def forward(self, rows_NI: Tensor, ends_E: Tensor) -> Tensor:
        """Return what is added to the product of rows, sorted by expert, [N, out]."""
        low = _product(self._switch.input(rows_NI, self._stream), padded_rank(self.A, -2), ends_E)
        return _product(low, padded_rank(self.B, -1), ends_E) * self._scale


class AdaptedExperts:
    """The forward pass of a layer's experts with adapters; without them, the experts compute as they did before."""

    def __init__(self, experts: Any, layers: Mapping[str, Sequence[str]], switch: Switch) -> None:
        """Take the experts.

        Args:
            experts: the module; its `adapters` has an `ExpertAdapter` of each layer that is adapted.
            layers: the layers of an expert whose outputs a parameter has, in this order, by the parameter's name.
            switch: whether the adapters are on.
        """
        self._experts, self._layers, self._switch = experts, layers, switch
        self._plain = experts.forward
        self._is_joint = hasattr(experts, "gate_up_proj_bias")
        """Whether they are GPT-OSS's: [experts, in, out], with biases, and with channels of gate and up by turns."""

    def forward(self, hidden_TH: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Return the weighted sum over each token's experts, [T, H].

        Args:
            hidden_TH: the tokens.
            chosen_TK: the experts of each.
            weights_TK: the weights of these experts.
        """
        if not self._switch.is_on:
            plain: Tensor = self._plain(hidden_TH, chosen_TK, weights_TK)
            return plain
        experts_N, order_N = chosen_TK.flatten().sort()
        numbers_E = torch.arange(self._experts.num_experts, device=experts_N.device)
        ends_E = torch.searchsorted(experts_N, numbers_E, right=True, out_int32=True)
        parts = self._products(hidden_TH[order_N // chosen_TK.shape[1]], "gate_up_proj", experts_N, ends_E)
        inner = self._experts._apply_gate(*parts) if self._is_joint else self._experts.act_fn(parts[0]) * parts[1]
        [down_NH] = self._products(inner, "down_proj", experts_N, ends_E)
        weighted_NH = down_NH * weights_TK.flatten()[order_N].unsqueeze(-1)
        return weighted_NH[order_N.argsort()].unflatten(0, chosen_TK.shape).sum(1).to(hidden_TH.dtype)

    def _products(self, rows_NI: Tensor, kind: str, experts_N: Tensor, ends_E: Tensor) -> list[Tensor]:
        """Return the outputs of the layers in the parameter `kind`, with what adapters add, [N, out] each.

        Args:
            rows_NI: the rows, sorted by expert.
            kind: the parameter.
            experts_N: the expert of each row.
            ends_E: the end of each expert's rows.
        """
        layers, adapters, weight = self._layers[kind], self._experts.adapters, getattr(self._experts, kind)
        if self._is_joint:
            product = grouped_mm(rows_NI, weight, ends_E) + getattr(self._experts, f"{kind}_bias")[experts_N]
        else:
            product = _product(rows_NI, weight, ends_E)
        parts = product.chunk(len(layers), dim=-1)
        return [
            part + adapters[layer](rows_NI, ends_E) if layer in adapters else part
            for layer, part in zip(layers, parts, strict=True)
        ]


def _product(rows_NI: Tensor, weight: Tensor, ends_E: Tensor) -> Tensor:
    """Return rows, sorted by expert, times the transposes of [E, O, I], or of one matrix for all, [N, O]."""
    return F.linear(rows_NI, weight) if weight.ndim == 2 else grouped_mm(rows_NI, weight.transpose(1, 2), ends_E)


def install_adapters(
    model: nn.Module, mappings: Mapping[str, WeightMapping], shape: AdapterShape, switch: Switch
) -> None:
    """Add the adapters in `mappings` to a model, before its parameters get their shapes and its layers other hooks.

    Args:
        model: the model, on `meta`.
        mappings: the mapping of each parameter by its name in memory.
        shape: the adapters.
        switch: whether they add anything to what their layers compute.
    """
    experts = dict[str, dict[str, list[str]]]()
    for name, mapping in mappings.items():
        path, _, kind = name.rpartition(".")
        if mapping.domain == "expert" and not mapping.is_adapter:
            experts.setdefault(path, {})[kind] = [str(layer_of(tensor.name)) for tensor in mapping.tensors]
        elif (a := mappings.get(adapter_name(name, "A"))) is not None:
            _adapt_linear(model.get_submodule(path), _rank(a), shape, _stream(mapping), switch)
    for path, layers in experts.items():
        names = {layer: expert_adapter(path, layer, "A") for own in layers.values() for layer in own}
        up = {layer: mappings[name] for layer, name in names.items() if name in mappings}
        if up:
            module: Any = model.get_submodule(path)
            module.forward = AdaptedExperts(module, layers, switch).forward
            module.adapters = nn.ModuleDict(
                {layer: ExpertAdapter(shape.scale(_rank(a)), _stream(a), switch) for layer, a in up.items()}
            )


def _rank(a: WeightMapping) -> int:
    return a.tensors[0].shape[0]


def _stream(mapping: WeightMapping) -> Stream:
    """Return the stream of random numbers for the inputs of a weight, which are cut where its columns are."""
    return "rank" if mapping.tensors[0].cut == "columns" else "tensor"


def _adapt_linear(linear: Any, rank: int, shape: AdapterShape, stream: Stream, switch: Switch) -> None:
    linear.lora_A = nn.Linear(linear.in_features, rank, bias=False)
    linear.lora_B = nn.Linear(rank, linear.out_features, bias=False)
    linear.register_forward_hook(partial(_add, switch, stream, shape.scale(rank)))


def _add(
    switch: Switch, stream: Stream, scale: float, linear: Any, inputs: tuple[Tensor, ...], output: Tensor
) -> Tensor:
    if not switch.is_on:
        return output
    return output + linear.lora_B(linear.lora_A(switch.input(inputs[0], stream))) * scale
