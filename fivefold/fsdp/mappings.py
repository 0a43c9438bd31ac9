"""Which Hugging Face tensors each parameter of a transformers model is made of.

transformers names parameters in memory as its files do, except that it keeps all experts of a layer in one parameter:

    files    model.layers.3.mlp.experts.7.gate_proj.weight  [F, H]
    memory   model.layers.3.mlp.experts.gate_up_proj        [E, 2F, H]
"""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.bridge.decoder import EMBEDDING, OUTPUT, VALUE_BIAS, VALUE_WEIGHT
from fivefold.bridge.latent_attention import latent_weights
from fivefold.bridge.mapping import (
    Column,
    ExpertBias,
    ExpertGatedMLP,
    ExpertRow,
    Replicated,
    Row,
    VocabParallel,
    WeightMapping,
)
from fivefold.families.family import MLPNames, MoENames
from fivefold.families.registry import find_family
from fivefold.families.shape import ModelShape


def mappings(shape: ModelShape) -> dict[str, WeightMapping]:
    """Return the mapping of each parameter by its name in memory, in the model's order.

    Raises:
        ValueError: a family that is not known.
    """
    return {mapping.parameter: mapping for mapping in _model(shape)}


def _model(shape: ModelShape) -> Iterator[WeightMapping]:
    family = find_family(shape.family)
    table = (shape.vocab, shape.hidden)
    yield VocabParallel(EMBEDDING, EMBEDDING, table)
    for index, is_moe in enumerate(shape.moe_layers):
        layer = f"model.layers.{index}"
        yield from _attention(shape, layer)
        if is_moe:
            assert family.moe is not None
            yield from _moe(shape, family.moe, layer)
        else:
            yield from _mlp(shape, layer, family.mlp, shape.ffn_hidden)
    yield _replicated("model.norm.weight", shape.hidden)
    if shape.value_head:
        yield _replicated(VALUE_WEIGHT, 1, shape.hidden)
        if shape.value_bias:
            yield _replicated(VALUE_BIAS, 1)
    elif not shape.tied_embeddings:
        yield VocabParallel(OUTPUT, OUTPUT, table)


def _replicated(name: str, *shape: int) -> WeightMapping:
    return Replicated(name, name, shape)


def _attention(shape: ModelShape, layer: str) -> Iterator[WeightMapping]:
    """Yield the attention of a layer, with the norms before and behind it."""
    yield _replicated(f"{layer}.input_layernorm.weight", shape.hidden)
    yield from _projections(shape, f"{layer}.self_attn")
    output = f"{layer}.self_attn.o_proj.weight"
    yield Row(output, output, (shape.hidden, shape.output_width))
    yield _replicated(f"{layer}.post_attention_layernorm.weight", shape.hidden)


def _projections(shape: ModelShape, attention: str) -> Iterator[WeightMapping]:
    """Yield what makes queries, keys and values."""
    if shape.latent is not None:
        for weight in latent_weights(shape, shape.latent):
            name = f"{attention}.{weight.hf}"
            yield (Column if weight.is_split else Replicated)(name, name, weight.shape)
        return
    widths = {"q": shape.query_width, "k": shape.key_width, "v": shape.value_width}
    for letter, width in widths.items():
        name = f"{attention}.{letter}_proj"
        yield Column(f"{name}.weight", f"{name}.weight", (width, shape.hidden))
        if shape.qkv_bias:
            yield Column(f"{name}.bias", f"{name}.bias", (width,))
    if shape.qk_norm:
        for letter in "qk":
            yield _replicated(f"{attention}.{letter}_norm.weight", shape.head_dim)


def _mlp(shape: ModelShape, layer: str, names: MLPNames, ffn: int) -> Iterator[WeightMapping]:
    """Yield the projections of a gated MLP: dense, or a shared expert."""
    for name in (names.gate, names.up):
        yield Column(f"{layer}.{name}", f"{layer}.{name}", (ffn, shape.hidden))
    yield Row(f"{layer}.{names.down}", f"{layer}.{names.down}", (shape.hidden, ffn))


def _moe(shape: ModelShape, names: MoENames, layer: str) -> Iterator[WeightMapping]:
    """Yield the router, the experts and the shared expert of a layer."""
    n, ffn, hidden = shape.n_experts, shape.expert_ffn_hidden, shape.hidden
    yield Replicated(f"{layer}.mlp.gate.weight", f"{layer}.{names.router}", (n, hidden))
    if names.bias is not None:
        yield ExpertBias(f"{layer}.mlp.gate.e_score_correction_bias", f"{layer}.{names.bias}", (n,))
    gate, up = f"{layer}.{names.expert.gate}", f"{layer}.{names.expert.up}"
    yield ExpertGatedMLP(f"{layer}.mlp.experts.gate_up_proj", gate, up, n, (ffn, hidden))
    yield ExpertRow(f"{layer}.mlp.experts.down_proj", f"{layer}.{names.expert.down}", n, (hidden, ffn))
    if names.shared is not None:
        yield from _mlp(shape, layer, names.shared, shape.shared_expert_ffn_hidden)
    if names.shared_gate is not None:
        yield _replicated(f"{layer}.{names.shared_gate}", 1, hidden)
