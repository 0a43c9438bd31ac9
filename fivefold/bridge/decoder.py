"""Which mapping each Megatron parameter has: a family's tensor names and a model's shape, as a list of mappings.

family    names in Hugging Face files    ┐
shape     sizes, layers with experts     ┴──mappings──>  one mapping a parameter, in the model's order
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from fivefold.bridge.latent_attention import latent_weights
from fivefold.bridge.mapping import (
    QKV,
    Column,
    ExpertBias,
    ExpertGatedMLP,
    ExpertRow,
    GatedMLP,
    Replicated,
    Row,
    Shape,
    TiedOutput,
    VocabParallel,
    WeightMapping,
)
from fivefold.families.family import Family, MLPNames
from fivefold.families.registry import find_family
from fivefold.families.shape import ModelShape

EMBEDDING = "model.embed_tokens.weight"
"""Hugging Face name of the embedding."""
OUTPUT = "lm_head.weight"
"""Hugging Face name of the output layer's weight."""
VALUE_WEIGHT, VALUE_BIAS = "score.weight", "score.bias"
"""Hugging Face names of a value head: those of a model for token classification with one label. A model for sequence
classification, which a reward model is, has the weight alone."""
VALUE_ALIASES = {"v_head.summary.weight": VALUE_WEIGHT, "v_head.summary.bias": VALUE_BIAS}
"""Names of the same tensors in the folders of TRL's models with a value head."""


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
    return {name: full for mapping in mappings(shape) for name, full in mapping.hf_shapes().items()}


def float32_tensors(shape: ModelShape) -> frozenset[str]:
    """Return the names of the Hugging Face tensors that are float32 whatever the dtype of the model."""
    return frozenset(name for mapping in mappings(shape) if mapping.keeps_float32 for name in mapping.hf_shapes())


def is_ignored(name: str, shape: ModelShape) -> bool:
    """Return whether files may hold the Hugging Face tensor `name` although no parameter reads it."""
    # With tied embeddings the embedding is the output layer's weight too. A critic has a value head in its place, and
    # the bias of a critic that becomes a reward model would move all scores alike.
    is_tied_output = shape.tied_embeddings and name == OUTPUT
    is_other_head = shape.value_head and (name == OUTPUT or name in VALUE_ALIASES)
    is_other_head |= shape.value_head and not shape.value_bias and name == VALUE_BIAS
    patterns = (pattern for pattern, _ in find_family(shape.family).ignored)
    is_known = is_tied_output or is_other_head or is_further_layer(name, shape)
    return is_known or any(re.fullmatch(pattern, name) for pattern in patterns)


def is_further_layer(name: str, shape: ModelShape) -> bool:
    """Return whether a Hugging Face tensor is of a layer for multi-token prediction, which nothing reads."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return find_family(shape.family).predicts_further and layer is not None and int(layer[1]) >= shape.n_layers


def is_optional(name: str, shape: ModelShape) -> bool:
    """Return whether files may lack the Hugging Face tensor `name`: a new value head, which begins at 0."""
    return shape.value_head and name in (VALUE_WEIGHT, VALUE_BIAS)


def _model(shape: ModelShape, family: Family) -> Iterator[WeightMapping]:
    table = (shape.vocab, shape.hidden)
    yield VocabParallel("embedding.word_embeddings.weight", EMBEDDING, table)
    for layer, is_moe in enumerate(shape.moe_layers):
        ours, theirs = f"decoder.layers.{layer}", f"model.layers.{layer}"
        yield from _attention(shape, ours, theirs)
        if is_moe:
            yield from _moe(shape, family, f"{ours}.mlp", theirs)
        else:
            yield from _mlp(f"{ours}.mlp", theirs, family.mlp, shape.hidden, shape.ffn_hidden)
    yield Replicated("decoder.final_layernorm.weight", "model.norm.weight", (shape.hidden,))
    if shape.value_head:
        yield Replicated("output_layer.weight", VALUE_WEIGHT, (1, shape.hidden))
        if shape.value_bias:
            yield Replicated("output_layer.bias", VALUE_BIAS, (1,))
    elif shape.tied_embeddings:
        yield TiedOutput("output_layer.weight", EMBEDDING, table)
    else:
        yield VocabParallel("output_layer.weight", OUTPUT, table)


def _attention(shape: ModelShape, ours: str, theirs: str) -> Iterator[WeightMapping]:
    """Yield the attention of a layer, with the norms before and behind it."""
    attention, hf_attention = f"{ours}.self_attention", f"{theirs}.self_attn"
    yield Replicated(f"{ours}.input_layernorm.weight", f"{theirs}.input_layernorm.weight", (shape.hidden,))
    yield from _projections(shape, attention, hf_attention)
    yield Row(f"{attention}.linear_proj.weight", f"{hf_attention}.o_proj.weight", (shape.hidden, shape.output_width))
    hf_norm = f"{theirs}.post_attention_layernorm.weight"
    yield Replicated(f"{ours}.pre_mlp_layernorm.weight", hf_norm, (shape.hidden,))


def _projections(shape: ModelShape, ours: str, theirs: str) -> Iterator[WeightMapping]:
    """Yield what makes queries, keys and values."""
    if shape.latent is not None:
        for weight in latent_weights(shape, shape.latent):
            cut = Column if weight.is_split else Replicated
            yield cut(f"{ours}.{weight.megatron}", f"{theirs}.{weight.hf}", weight.shape)
        return
    heads = (shape.n_heads, shape.n_kv_heads, shape.head_dim)
    features_of: dict[str, tuple[int, ...]] = {"weight": (shape.hidden,)}
    if shape.qkv_bias:
        features_of["bias"] = ()
    for kind, features in features_of.items():
        q, k, v = (f"{theirs}.{letter}_proj.{kind}" for letter in "qkv")
        yield QKV(f"{ours}.linear_qkv.{kind}", q, k, v, *heads, features)
    if shape.qk_norm:
        for letter in "qk":
            name, hf = f"{ours}.{letter}_layernorm.weight", f"{theirs}.{letter}_norm.weight"
            yield Replicated(name, hf, (shape.head_dim,))


def _moe(shape: ModelShape, family: Family, ours: str, theirs: str) -> Iterator[WeightMapping]:
    """Yield the router, the experts and the shared expert of a layer."""
    names = family.moe
    if names is None:
        raise ValueError(f"{theirs} has experts, but the model family {family.model_type!r} names none")
    n, ffn, hidden = shape.n_experts, shape.expert_ffn_hidden, shape.hidden
    yield Replicated(f"{ours}.router.weight", f"{theirs}.{names.router}", (n, hidden))
    if names.bias is not None:
        yield ExpertBias(f"{ours}.router.expert_bias", f"{theirs}.{names.bias}", (n,))
    gate, up = f"{theirs}.{names.expert.gate}", f"{theirs}.{names.expert.up}"
    yield ExpertGatedMLP(f"{ours}.experts.weight1", gate, up, n, (ffn, hidden))
    yield ExpertRow(f"{ours}.experts.weight2", f"{theirs}.{names.expert.down}", n, (hidden, ffn))
    if names.shared is not None:
        yield from _mlp(f"{ours}.shared_experts", theirs, names.shared, hidden, shape.shared_expert_ffn_hidden)
    if names.shared_gate is not None:
        yield Replicated(f"{ours}.shared_experts.gate_weight", f"{theirs}.{names.shared_gate}", (1, hidden))


def _mlp(ours: str, theirs: str, names: MLPNames, hidden: int, ffn: int) -> Iterator[WeightMapping]:
    """Yield the two parameters of a gated MLP: dense, or a shared expert."""
    yield GatedMLP(f"{ours}.linear_fc1.weight", f"{theirs}.{names.gate}", f"{theirs}.{names.up}", (ffn, hidden))
    yield Row(f"{ours}.linear_fc2.weight", f"{theirs}.{names.down}", (hidden, ffn))
