"""How Megatron-Core spells the parameters of a model in a `torch_dist` checkpoint.

    our parameter                            keys of a checkpoint                                       shape
    decoder.layers.3.mlp.linear_fc1.weight   decoder.layers.mlp.linear_fc1.weight                       [layers, ...]
                                             decoder.layers.3.mlp.linear_fc1.weight                     [...]
    decoder.layers.3.mlp.experts.weight1     decoder.layers.mlp.experts.experts.linear_fc1.weight       [layers, E, ...]
                                             decoder.layers.3.mlp.experts.experts.5.linear_fc1.weight_w [...]

A checkpoint stacks layers that are all alike, or names each; so with experts; gate and up are one tensor, or two that
end in `_w` and `_v`. Norms are named after the layer's own module or, where TransformerEngine fuses them, after the
linear layer after them. All of these are read; one of them is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal

from fivefold.bridge.groups import ShardGroups
from fivefold.bridge.mapping import WeightMapping
from fivefold.families.shape import ModelShape

Spec = Literal["te", "local"]
"""The layer specs of Megatron-Core: TransformerEngine's modules, or its own."""

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_INPUT_NORM, _PRE_MLP_NORM = "input_layernorm.weight", "pre_mlp_layernorm.weight"
_FUSED_INPUT_NORM = "self_attention.linear_qkv.layer_norm_weight"
_FUSED_PRE_MLP_NORM = "mlp.linear_fc1.layer_norm_weight"
UNFUSED_NORMS = {_FUSED_INPUT_NORM: _INPUT_NORM, _FUSED_PRE_MLP_NORM: _PRE_MLP_NORM}
"""Our name of each norm that is part of the linear layer after it in TransformerEngine's layers, within a layer."""
_FUSED_LATENT_NORMS = {
    f"self_attention.{letter}_layernorm.weight": f"self_attention.linear_{letter}_up_proj.layer_norm_weight"
    for letter in ("q", "kv")
}
_SPELLINGS = {
    # Both specs write the first spelling: the local one is renamed to it.
    _INPUT_NORM: (_FUSED_INPUT_NORM, _INPUT_NORM),
    _PRE_MLP_NORM: (_PRE_MLP_NORM, _FUSED_PRE_MLP_NORM),
    **{name: (name, fused) for name, fused in _FUSED_LATENT_NORMS.items()},
    "mlp.experts.weight1": ("mlp.experts.experts.{expert}linear_fc1.weight",),
    "mlp.experts.weight2": ("mlp.experts.experts.{expert}linear_fc2.weight",),
    "mlp.experts.fc1.bias": ("mlp.experts.experts.{expert}linear_fc1.bias",),
    "mlp.experts.fc2.bias": ("mlp.experts.experts.{expert}linear_fc2.bias",),
}
"""Names of a layer's parameters in checkpoints, where they differ from ours."""


@dataclass(frozen=True)
class Part:
    """Rows of a parameter as one tensor of a checkpoint holds them."""

    key: str
    lead: tuple[int, ...]
    """Index into the leading dimensions of the tensor: layer, expert, both or none."""
    lead_sizes: tuple[int, ...]
    """Sizes of these dimensions."""
    first: int
    """First row of the parameter (of [experts * rows, columns], where it has experts) that the tensor holds."""
    sizes: tuple[int, ...]
    """Shape of the rows: [rows, columns], or [elements]."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return (*self.lead_sizes, *self.sizes)


@dataclass(frozen=True)
class Spelling:
    """A way to store a parameter."""

    parts: tuple[Part, ...]
    """The parts of the parameter, in the order of its rows."""

    @property
    def keys(self) -> set[str]:
        """Names of the tensors that it takes."""
        return {part.key for part in self.parts}


def check_layers(shape: ModelShape) -> None:
    """Refuse a model whose layers Megatron-Core would compute otherwise than Hugging Face, from the same weights.

    Raises:
        ValueError: it has latent attention that turns channels half of the positional part apart, gated delta nets,
            norms over all heads or on the outputs of layers.
    """
    if shape.sandwich_norms:
        raise ValueError(
            f"{shape.family}: norms on the outputs of attention and MLP are not supported in torch_dist, because "
            "Megatron-Core's layers have none: use the Hugging Face folder"
        )
    if shape.delta is not None:
        raise ValueError(
            f"{shape.family}: gated delta nets are not supported in torch_dist, where Megatron-Core orders their rows "
            "otherwise: use the Hugging Face folder"
        )
    if shape.wide_qk_norm:
        raise ValueError(
            f"{shape.family}: norms over all heads are not supported in torch_dist, because Megatron-Core's are on "
            "each head: use the Hugging Face folder"
        )
    if shape.latent is not None and not shape.latent.rotates_neighbours:
        raise ValueError(
            f"{shape.family}: rope_interleave=false is not supported in torch_dist, because Megatron-Core's latent "
            "attention always turns neighbouring channels: use the Hugging Face folder"
        )


def spellings(mapping: WeightMapping, n_layers: int) -> Iterator[Spelling]:
    """Yield every way in which a checkpoint may store the parameter of `mapping`, the usual one first."""
    layer, name = _split(mapping.parameter)
    has_experts, is_gated = mapping.domain == "expert", len(mapping.tensors) == 2
    for pattern, stacked, expert_axis, together in product(
        _SPELLINGS.get(name, (name,)) if layer is not None else (name,),
        (True, False) if layer is not None else (False,),
        (True, False) if has_experts else (False,),
        (True, False) if is_gated else (True,),
    ):
        yield _spell(mapping, pattern, layer, n_layers if stacked else None, expert_axis, together)


def written_spelling(
    mapping: WeightMapping, n_layers: int, *, stacked: bool, spec: Spec, is_moe: bool, is_latent: bool
) -> Spelling:
    """Return how Megatron-Core writes the parameter of `mapping`.

    Args:
        mapping: the parameter.
        n_layers: layers of the model.
        stacked: whether one tensor holds a parameter of all layers.
        spec: the layer spec of the models that will load the checkpoint.
        is_moe: whether the parameter's layer has experts.
        is_latent: whether the model has multi-head latent attention.
    """
    layer, name = _split(mapping.parameter)
    pattern = name
    if layer is not None:
        pattern = (_latent_name if is_latent else _usual_name)(name, spec, is_moe=is_moe)
    in_stack = stacked and layer is not None
    return _spell(mapping, pattern, layer, n_layers if in_stack else None, mapping.domain == "expert", together=True)


def _usual_name(name: str, spec: Spec, *, is_moe: bool) -> str:
    if name == _PRE_MLP_NORM and not (is_moe and spec == "te"):
        return _FUSED_PRE_MLP_NORM
    return _SPELLINGS.get(name, (name,))[0]


def _latent_name(name: str, spec: Spec, *, is_moe: bool) -> str:
    """Return the name in a layer with latent attention, whose specs fuse other norms, and the local one none."""
    if name == _INPUT_NORM or (name == _PRE_MLP_NORM and spec == "local"):
        return name
    if spec == "te" and name in _FUSED_LATENT_NORMS:
        return _FUSED_LATENT_NORMS[name]
    return _usual_name(name, spec, is_moe=is_moe)


def layer_of(megatron: str) -> int | None:
    """Return the layer of a parameter; None for those outside the layers."""
    return _split(megatron)[0]


def _split(megatron: str) -> tuple[int | None, str]:
    match = _LAYER.fullmatch(megatron)
    return (int(match[1]), match[2]) if match else (None, megatron)


def _spell(
    mapping: WeightMapping, pattern: str, layer: int | None, n_stacked: int | None, expert_axis: bool, together: bool
) -> Spelling:
    """Return a spelling.

    Args:
        mapping: the parameter.
        pattern: its name within a layer; `{expert}` is where an expert's number goes.
        layer: its layer.
        n_stacked: layers that one tensor holds; None: each layer has its own tensor.
        expert_axis: whether one tensor holds all experts.
        together: whether one tensor holds gate and up.
    """
    shape = mapping.local_shape(ShardGroups())
    n_experts, sizes = (shape[0], shape[1:]) if mapping.domain == "expert" else (1, shape)
    prefix = "" if layer is None else "decoder.layers." if n_stacked else f"decoder.layers.{layer}."
    ends = ("",) if together else ("_w", "_v")
    part_sizes = (sizes[0] // len(ends), *sizes[1:])
    parts = []
    for expert, (half, end) in product(range(n_experts), enumerate(ends)):
        number = f"{expert}." if mapping.domain == "expert" and not expert_axis else ""
        lead = [(layer, n_stacked)] if layer is not None and n_stacked else []
        lead += [(expert, n_experts)] if expert_axis else []
        parts.append(
            Part(
                key=prefix + pattern.format(expert=number) + end,
                lead=tuple(index for index, _ in lead),
                lead_sizes=tuple(size for _, size in lead),
                first=expert * sizes[0] + half * part_sizes[0],
                sizes=part_sizes,
            )
        )
    return Spelling(tuple(parts))
