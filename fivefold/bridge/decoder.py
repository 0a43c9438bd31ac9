"""Which mapping each Megatron parameter has: a model's Hugging Face tensors under Megatron-Core's names.

tensors of the model ──names below──> one mapping a parameter, in the model's order
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from fivefold.bridge.mapping import TiedOutput, WeightMapping, mapping_of
from fivefold.families.adapters import MATRICES, find_adapter, layer_of
from fivefold.families.delta_net import DeltaNet
from fivefold.families.family import Family, MLPNames
from fivefold.families.registry import find_family
from fivefold.families.shape import LayerKind, ModelShape
from fivefold.families.tensors import OUTPUT, VALUE_BIAS, VALUE_WEIGHT, Shape, WeightTensor, embedding, tensors

VALUE_ALIASES = {"v_head.summary.weight": VALUE_WEIGHT, "v_head.summary.bias": VALUE_BIAS}
"""Names of a value head's tensors in the folders of TRL's models."""

_LATENTS = {
    "linear_q_down_proj": "q_a_proj",
    "linear_kv_down_proj": "kv_a_proj_with_mqa",
    "linear_q_proj": "q_proj",
    "q_layernorm": "q_a_layernorm",
    "linear_q_up_proj": "q_b_proj",
    "kv_layernorm": "kv_a_layernorm",
    "linear_kv_up_proj": "kv_b_proj",
}
"""Modules of multi-head latent attention, without the output projection."""
_LATENT_QUERIES, _DIRECT_QUERIES = ("linear_q_down_proj", "q_layernorm", "linear_q_up_proj"), ("linear_q_proj",)
"""Modules that make queries, by way of a latent or directly."""

_Rows = Iterator[tuple[str, tuple[str, ...]]]
"""Name of a parameter, and of the Hugging Face tensors in it, both within a layer."""


def mappings(shape: ModelShape) -> tuple[WeightMapping, ...]:
    """Return one mapping for each Megatron parameter of the whole model, in the model's order.

    Raises:
        ValueError: a family that is not known, or one that names no experts where the shape has them.
    """
    return tuple(_model(shape, find_family(shape.family)))


def expected_tensors(shape: ModelShape) -> dict[str, Shape]:
    """Return the names and full shapes of the model's Hugging Face tensors, in the model's order.

    Raises:
        ValueError: as `mappings` does.
    """
    return {
        name: full
        for mapping in mappings(shape)
        if not mapping.is_adapter
        for name, full in mapping.hf_shapes().items()
    }


def file_tensors(shape: ModelShape) -> dict[str, Shape]:
    """Return the names and full shapes of the tensors as files hold them: some have all experts' in one.

    Raises:
        ValueError: as `mappings` does.
    """
    own = (mapping for mapping in mappings(shape) if not mapping.is_adapter)
    return {name: full for mapping in own for name, full in mapping.file_shapes().items()}


def float32_tensors(shape: ModelShape) -> frozenset[str]:
    """Return the names of the Hugging Face tensors that are float32 whatever the dtype of the model."""
    return frozenset(tensor.name for tensor in tensors(shape) if tensor.keeps_float32)


def is_ignored(name: str, shape: ModelShape) -> bool:
    """Return whether files may hold the Hugging Face tensor `name` although no parameter reads it."""
    # With tied embeddings the embedding is the output layer's weight too. A critic has a value head in its place, and
    # the bias of a critic that becomes a reward model would move all scores alike.
    is_tied_output = shape.tied_embeddings and name == OUTPUT
    is_other_head = shape.value_head and (name == OUTPUT or name in VALUE_ALIASES)
    is_other_head |= shape.value_head and not shape.value_bias and name == VALUE_BIAS
    family = find_family(shape.family)
    patterns = (pattern for pattern, _ in family.ignored)
    is_known = is_tied_output or is_other_head or family.keeps(name, shape.n_layers)
    return is_known or any(re.fullmatch(pattern, name) for pattern in patterns)


def is_optional(name: str, shape: ModelShape) -> bool:
    """Return whether files may lack the Hugging Face tensor `name`: a new value head, which begins at 0."""
    return shape.value_head and name in (VALUE_WEIGHT, VALUE_BIAS)


def _model(shape: ModelShape, family: Family) -> Iterator[WeightMapping]:
    by_name = {tensor.name: tensor for tensor in tensors(shape)}
    yield mapping_of("embedding.word_embeddings.weight", by_name[embedding(shape)])
    for layer, is_moe in enumerate(shape.moe_layers):
        for parameter, names in _layer(shape, family, shape.layer_kinds[layer], is_moe=is_moe):
            found = [by_name[family.in_files(f"model.layers.{layer}.{name}")] for name in names]
            yield mapping_of(f"decoder.layers.{layer}.{parameter}", *found, n_units=_n_units(shape, parameter))
            yield from _adapters(f"decoder.layers.{layer}.{parameter}", found, by_name)
    yield mapping_of("decoder.final_layernorm.weight", by_name[family.in_files("model.norm.weight")])
    if shape.value_head:
        yield mapping_of("output_layer.weight", by_name[VALUE_WEIGHT])
        if shape.value_bias:
            yield mapping_of("output_layer.bias", by_name[VALUE_BIAS])
    elif shape.tied_embeddings:
        yield TiedOutput("output_layer.weight", (by_name[embedding(shape)],))
    else:
        yield mapping_of("output_layer.weight", by_name[OUTPUT])


def _adapters(parameter: str, weights: list[WeightTensor], by_name: dict[str, WeightTensor]) -> Iterator[WeightMapping]:
    """Yield the mappings of the adapters of the weights in a parameter, each a separate parameter."""
    module = parameter.rpartition(".")[0]
    for weight in weights:
        layer = layer_of(weight.name)
        for matrix in MATRICES if layer is not None else ():
            if (found := find_adapter(by_name, weight.name, matrix)) is not None:
                yield mapping_of(f"{module}.adapters.{layer}.{matrix}", found)


def _n_units(shape: ModelShape, parameter: str) -> int | None:
    """Return the heads by which the rows of a parameter are grouped; None: they are not."""
    if ".linear_qkv." in parameter:
        return shape.n_kv_heads
    is_grouped = shape.delta is not None and parameter.endswith((".in_proj.weight", ".conv1d.weight"))
    return shape.delta.n_key_heads if shape.delta is not None and is_grouped else None


def _layer(shape: ModelShape, family: Family, kind: LayerKind, *, is_moe: bool) -> _Rows:
    yield "input_layernorm.weight", ("input_layernorm.weight",)
    if kind == "delta" and shape.delta is not None:
        yield from _delta_net(shape.delta)
    else:
        yield from _projections(shape)
        if shape.sinks:
            yield "self_attention.core_attention.softmax_offset", ("self_attn.sinks",)
        for part in ("weight", "bias") if shape.output_bias else ("weight",):
            yield f"self_attention.linear_proj.{part}", (f"self_attn.o_proj.{part}",)
    if shape.sandwich_norms:
        yield "post_self_attn_layernorm.weight", ("post_attention_layernorm.weight",)
        yield "pre_mlp_layernorm.weight", ("pre_feedforward_layernorm.weight",)
    else:
        yield "pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",)
    if is_moe:
        yield from _moe(family)
    else:
        yield from _mlp("mlp", family.mlp)
    if shape.sandwich_norms:
        yield "post_mlp_layernorm.weight", ("post_feedforward_layernorm.weight",)


def _projections(shape: ModelShape) -> _Rows:
    """Yield what makes queries, keys and values, and the norms on them."""
    if shape.latent is not None:
        absent = _DIRECT_QUERIES if shape.latent.query_rank is not None else _LATENT_QUERIES
        for ours, theirs in _LATENTS.items():
            if ours not in absent:
                yield f"self_attention.{ours}.weight", (f"self_attn.{theirs}.weight",)
        return
    for kind in ("weight", "bias") if shape.qkv_bias else ("weight",):
        yield f"self_attention.linear_qkv.{kind}", tuple(f"self_attn.{letter}_proj.{kind}" for letter in "qkv")
    if shape.qk_norm:
        for letter in "qk":
            yield f"self_attention.{letter}_layernorm.weight", (f"self_attn.{letter}_norm.weight",)


def _delta_net(delta: DeltaNet) -> _Rows:
    """Yield the parameters of a gated delta net: one projection makes all that it needs of a token."""
    inputs = ("qkvz", "ba") if delta.is_grouped else ("qkv", "z", "b", "a")
    yield "self_attention.dt_bias", ("linear_attn.dt_bias",)
    yield "self_attention.A_log", ("linear_attn.A_log",)
    yield "self_attention.conv1d.weight", ("linear_attn.conv1d.weight",)
    yield "self_attention.in_proj.weight", tuple(f"linear_attn.in_proj_{name}.weight" for name in inputs)
    yield "self_attention.norm.weight", ("linear_attn.norm.weight",)
    yield "self_attention.linear_proj.weight", ("linear_attn.out_proj.weight",)


def _moe(family: Family) -> _Rows:
    names = family.moe
    assert names is not None  # `tensors` has raised otherwise
    yield "mlp.router.weight", (names.router,)
    if names.shift is not None:
        yield "mlp.router.bias", (names.shift,)
    if names.bias is not None:
        yield "mlp.router.expert_bias", (names.bias,)
    if names.joint is not None:
        yield "mlp.experts.weight1", (names.joint.gate_up,)
        yield "mlp.experts.fc1.bias", (names.joint.gate_up_bias,)
        yield "mlp.experts.weight2", (names.joint.down,)
        yield "mlp.experts.fc2.bias", (names.joint.down_bias,)
    else:
        yield "mlp.experts.weight1", (names.expert.gate, names.expert.up)
        yield "mlp.experts.weight2", (names.expert.down,)
    if names.shared is not None:
        yield from _mlp("mlp.shared_experts", names.shared)
    if names.shared_gate is not None:
        yield "mlp.shared_experts.gate_weight", (names.shared_gate,)


def _mlp(ours: str, names: MLPNames) -> _Rows:
    """Yield the two parameters of a gated MLP: dense, or a shared expert."""
    yield f"{ours}.linear_fc1.weight", (names.gate, names.up)
    yield f"{ours}.linear_fc2.weight", (names.down,)
