"""How Megatron-Core spells the parameters of a model in a `torch_dist` checkpoint.

    our parameter                            keys of a checkpoint                                       shape
    decoder.layers.3.mlp.linear_fc1.weight   decoder.layers.mlp.linear_fc1.weight                       [layers, ...]
                                             decoder.layers.3.mlp.linear_fc1.weight                     [...]
    decoder.layers.3.mlp.experts.weight1     decoder.layers.mlp.experts.experts.linear_fc1.weight       [layers, E, ...]
                                             decoder.layers.3.mlp.experts.experts.5.linear_fc1.weight_w [...]
    decoder.layers.3.self_attention.A_log    decoder.layers.3.self_attention.A_log                      [...]

A checkpoint stacks layers that are all alike, or names each; so with experts; gate and up are one tensor, or two that
end in `_w` and `_v`. Norms are named after the layer's own module or, where TransformerEngine fuses them, after the
linear layer before or after them. All of these are read; one of them is written.

Some rows have another order there. Our parameters hold what belongs to a key head of a gated delta net together, and
with output gates each query head before its gates. A checkpoint holds all queries of a gated delta net, all keys and so
on, each in a tensor, and of a key/value head all query heads, then their gates.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Literal, NamedTuple

from fivefold.bridge.groups import ShardGroups
from fivefold.bridge.mapping import WeightMapping
from fivefold.families.delta_net import DeltaNet
from fivefold.families.shape import ModelShape

Spec = Literal["te", "local"]
"""The layer specs of Megatron-Core: TransformerEngine's modules, or its own."""

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_INPUT_NORM, _PRE_MLP_NORM = "input_layernorm.weight", "pre_mlp_layernorm.weight"
_FUSED_INPUT_NORM = "self_attention.linear_qkv.layer_norm_weight"
_FUSED_PRE_MLP_NORM = "mlp.linear_fc1.layer_norm_weight"
UNFUSED_NORMS = {_FUSED_INPUT_NORM: _INPUT_NORM, _FUSED_PRE_MLP_NORM: _PRE_MLP_NORM}
"""Our name of each norm that is part of the linear layer after it in TransformerEngine's layers, within a layer."""
_QUERY_NORM, _KEY_NORM = "self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"
_POST_ATTENTION_NORM, _POST_MLP_NORM = "post_self_attn_layernorm.weight", "post_mlp_layernorm.weight"
_FUSED_LATENT_NORMS = {
    f"self_attention.{letter}_layernorm.weight": f"self_attention.linear_{letter}_up_proj.layer_norm_weight"
    for letter in ("q", "kv")
}
_SPELLINGS: Mapping[str, tuple[str, ...]] = {
    # Both specs write the first spelling: the local one is renamed to it.
    _INPUT_NORM: (_FUSED_INPUT_NORM, _INPUT_NORM),
    _PRE_MLP_NORM: (_PRE_MLP_NORM, _FUSED_PRE_MLP_NORM),
    **{name: (name, fused) for name, fused in _FUSED_LATENT_NORMS.items()},
    # slime's norms over all heads have the last names of these two.
    _QUERY_NORM: (_QUERY_NORM, _FUSED_LATENT_NORMS[_QUERY_NORM], "self_attention.q_norm.weight"),
    _KEY_NORM: (_KEY_NORM, "self_attention.k_norm.weight"),
    "mlp.experts.weight1": ("mlp.experts.experts.{expert}linear_fc1.weight",),
    "mlp.experts.weight2": ("mlp.experts.experts.{expert}linear_fc2.weight",),
    "mlp.experts.fc1.bias": ("mlp.experts.experts.{expert}linear_fc1.bias",),
    "mlp.experts.fc2.bias": ("mlp.experts.experts.{expert}linear_fc2.bias",),
    # Megatron-Bridge's name, the one in forks of Megatron-LM, and mbridge's.
    _POST_ATTENTION_NORM: (
        "self_attention.linear_proj.post_layernorm.weight",
        _POST_ATTENTION_NORM,
        "post_attention_layernorm.weight",
    ),
    _POST_MLP_NORM: ("mlp.linear_fc2.post_layernorm.weight", _POST_MLP_NORM, "post_feedforward_layernorm.weight"),
}
"""Names of a layer's parameters in checkpoints, where they differ from ours."""
CENTRED = "self_attention.out_norm.weight"
"""The name of a norm that checkpoints hold as weight - 1, within a layer."""
_DELTA_SPELLINGS: Mapping[str, tuple[str, ...]] = {
    **_SPELLINGS,
    _INPUT_NORM: ("self_attention.in_proj.layer_norm_weight", _INPUT_NORM, "self_attention.input_layernorm.weight"),
    "self_attention.norm.weight": (CENTRED,),
    "self_attention.linear_proj.weight": ("self_attention.out_proj.weight",),
}
"""The same in layers that are gated delta nets."""
_FILE_MODULE = ".linear_attn."
"""What is around the name of a gated delta net in the names of its tensors in files."""
_IN_PROJ, _CONVOLUTION = "self_attention.in_proj.weight", "self_attention.conv1d.weight"


@dataclass(frozen=True)
class Part:
    """Consecutive rows of a parameter that are consecutive in a tensor of a checkpoint."""

    key: str
    lead: tuple[int, ...]
    """Index into the leading dimensions of the tensor: layer, expert, both or none."""
    lead_sizes: tuple[int, ...]
    """Sizes of these dimensions."""
    first: int
    """The first of the rows in the parameter (in [experts * rows, columns], where it has experts)."""
    n_rows: int
    row: int
    """The first of the rows in the tensor, after its leading dimensions."""
    sizes: tuple[int, ...]
    """Shape of the tensor after its leading dimensions: [rows, columns], [elements], or [rows, 1, columns]."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return (*self.lead_sizes, *self.sizes)

    @property
    def n_elements(self) -> int:
        """Number of elements of the rows."""
        return self.n_rows * prod(self.sizes[1:])


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
        ValueError: it has latent attention that turns channels half of the positional part apart.
    """
    if shape.latent is not None and not shape.latent.rotates_neighbours:
        raise ValueError(
            f"{shape.family}: rope_interleave=false is not supported in torch_dist, because Megatron-Core's latent "
            "attention always turns neighbouring channels: use the Hugging Face folder"
        )


def check_spec(shape: ModelShape, spec: Spec) -> None:
    """Refuse a layer spec that Megatron-Core does not have for a model.

    Raises:
        ValueError: the model has gated delta nets or norms on the outputs of layers, and the spec is the local one.
    """
    if spec == "local" and (shape.delta is not None or shape.sandwich_norms):
        what = "gated delta nets" if shape.delta is not None else "norms on the outputs of attention and MLP"
        raise ValueError(
            f"{shape.family}: --spec local has no {what}, which exist with TransformerEngine's layers only: "
            "leave --spec out"
        )


def spellings(mapping: WeightMapping, shape: ModelShape) -> Iterator[Spelling]:
    """Yield every way in which a checkpoint may store a parameter of a model, the usual one first."""
    layer, name = _split(mapping.parameter)
    has_experts, is_gated = mapping.domain == "expert", len(mapping.tensors) == 2 and not _is_reordered(shape, name)
    for pattern, stacked, expert_axis, together in product(
        (name,) if layer is None else _names(shape, layer).get(name, (name,)),
        (True, False) if layer is not None else (False,),
        (True, False) if has_experts else (False,),
        (True, False) if is_gated else (True,),
    ):
        yield _spell(mapping, shape, pattern, stacked=stacked, expert_axis=expert_axis, together=together)
    if layer is not None and all(_FILE_MODULE in tensor.name for tensor in mapping.tensors):
        yield _as_in_files(mapping, layer)


def written_spelling(mapping: WeightMapping, shape: ModelShape, *, stacked: bool, spec: Spec) -> Spelling:
    """Return how Megatron-Core writes a parameter of a model.

    Args:
        mapping: the parameter.
        shape: the model.
        stacked: whether one tensor holds a parameter of all layers.
        spec: the layer spec of the models that will load the checkpoint.
    """
    layer, name = _split(mapping.parameter)
    pattern = name if layer is None else _written_name(shape, layer, name, spec)
    in_stack = stacked and layer is not None
    return _spell(mapping, shape, pattern, stacked=in_stack, expert_axis=mapping.domain == "expert", together=True)


def _names(shape: ModelShape, layer: int) -> Mapping[str, tuple[str, ...]]:
    return _DELTA_SPELLINGS if shape.layer_kinds[layer] == "delta" else _SPELLINGS


def _written_name(shape: ModelShape, layer: int, name: str, spec: Spec) -> str:
    if shape.latent is not None:
        # The specs of layers with latent attention fuse other norms, and the local one none.
        if name == _INPUT_NORM or (name == _PRE_MLP_NORM and spec == "local"):
            return name
        if spec == "te" and name in _FUSED_LATENT_NORMS:
            return _FUSED_LATENT_NORMS[name]
    if name == _PRE_MLP_NORM and not (shape.moe_layers[layer] and spec == "te"):
        return _FUSED_PRE_MLP_NORM
    return _names(shape, layer).get(name, (name,))[0]


def layer_of(megatron: str) -> int | None:
    """Return the layer of a parameter; None for those outside the layers."""
    return _split(megatron)[0]


def _split(megatron: str) -> tuple[int | None, str]:
    match = _LAYER.fullmatch(megatron)
    return (int(match[1]), match[2]) if match else (None, megatron)


def _spell(
    mapping: WeightMapping, shape: ModelShape, pattern: str, *, stacked: bool, expert_axis: bool, together: bool
) -> Spelling:
    """Return a spelling.

    Args:
        mapping: the parameter.
        shape: the model.
        pattern: its name within a layer; `{expert}` is where an expert's number goes.
        stacked: whether one tensor holds all layers.
        expert_axis: whether one tensor holds all experts.
        together: whether one tensor holds gate and up.
    """
    layer, name = _split(mapping.parameter)
    whole = mapping.local_shape(ShardGroups())
    n_experts, sizes = (whole[0], whole[1:]) if mapping.domain == "expert" else (1, whole)
    prefix = "" if layer is None else "decoder.layers." if stacked else f"decoder.layers.{layer}."
    runs = list(_reordered(shape, name)) or _in_order(sizes[0], together=together)
    n_rows: dict[str, int] = {}
    for run in runs:
        n_rows[run.end] = n_rows.get(run.end, 0) + run.n_rows
    parts: list[Part] = []
    for expert in range(n_experts):
        number = f"{expert}." if mapping.domain == "expert" and not expert_axis else ""
        lead = [(layer, shape.n_layers)] if layer is not None and stacked else []
        lead += [(expert, n_experts)] if expert_axis else []
        for run in runs:
            parts.append(
                Part(
                    key=prefix + pattern.format(expert=number) + run.end,
                    lead=tuple(index for index, _ in lead),
                    lead_sizes=tuple(size for _, size in lead),
                    first=parts[-1].first + parts[-1].n_rows if parts else 0,
                    n_rows=run.n_rows,
                    row=run.row,
                    sizes=(n_rows[run.end], *sizes[1:]),
                )
            )
    return Spelling(tuple(parts))


def _as_in_files(mapping: WeightMapping, layer: int) -> Spelling:
    """Return how a checkpoint stores a gated delta net that is transformers' module, as slime's are."""
    parts = []
    for piece in mapping.pieces(ShardGroups()):
        key = f"decoder.layers.{layer}.self_attention{_FILE_MODULE}{piece.name.partition(_FILE_MODULE)[2]}"
        first = piece.start // prod(piece.sizes[1:])
        parts.append(Part(key, (), (), first, piece.sizes[0], piece.offsets[0], piece.shape))
    return Spelling(tuple(parts))


class _Run(NamedTuple):
    """The next rows of a parameter, of one expert."""

    end: str
    """What follows the parameter's name in the name of the tensor that has them."""
    row: int
    """The first of them in this tensor."""
    n_rows: int


def _in_order(n_rows: int, *, together: bool) -> list[_Run]:
    ends = ("",) if together else ("_w", "_v")
    return [_Run(end, 0, n_rows // len(ends)) for end in ends]


def _is_reordered(shape: ModelShape, name: str) -> bool:
    return next(_reordered(shape, name), None) is not None


def _reordered(shape: ModelShape, name: str) -> Iterator[_Run]:
    """Yield the runs of a parameter whose rows have another order in checkpoints; none if they have the same."""
    if shape.delta is not None and name in (_IN_PROJ, _CONVOLUTION):
        yield from _of_delta_net(shape.delta, is_convolution=name == _CONVOLUTION)
    elif shape.output_gate and name.startswith("self_attention.linear_qkv."):
        yield from _of_gated_queries(shape.n_heads // shape.n_kv_heads, shape.n_kv_heads, shape.head_dim)


def _of_delta_net(delta: DeltaNet, *, is_convolution: bool) -> Iterator[_Run]:
    """Yield what belongs to each key head."""
    shared = delta.n_value_heads // delta.n_key_heads
    values = shared * delta.value_dim
    rows = {".query": delta.key_dim, ".key": delta.key_dim, ".value": values}
    if not is_convolution:
        rows |= {".z": values, ".beta": shared, ".alpha": shared}
    for head in range(delta.n_key_heads):
        for end, n_rows in rows.items():
            yield _Run(end, head * n_rows, n_rows)


def _of_gated_queries(n_heads: int, n_groups: int, width: int) -> Iterator[_Run]:
    """Yield the query heads of each key/value head, `n_heads` with their gates, and then its key and value."""
    for group in range(n_groups):
        first = group * (2 * n_heads + 2) * width
        for head in range(n_heads):
            yield _Run("", first + head * width, width)
            yield _Run("", first + (n_heads + head) * width, width)
        yield _Run("", first + 2 * n_heads * width, 2 * width)
