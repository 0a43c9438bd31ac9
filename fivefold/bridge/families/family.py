"""What the model families share: a family is a table of names, and a shape makes it a list of mappings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fivefold.bridge.mapping import (
    QKV,
    ExpertGatedMLP,
    ExpertRow,
    GatedMLP,
    Replicated,
    Row,
    TiedOutput,
    VocabParallel,
    WeightMapping,
)
from fivefold.families.shape import ModelShape


@dataclass(frozen=True)
class MLPNames:
    """Names of a dense MLP's weights, relative to the layer."""

    gate: str = "mlp.gate_proj.weight"
    up: str = "mlp.up_proj.weight"
    down: str = "mlp.down_proj.weight"


@dataclass(frozen=True)
class MoENames:
    """Names of a mixture-of-experts layer's weights, relative to the layer; the experts' have an `{expert}` field."""

    router: str
    expert: MLPNames
    shared: MLPNames | None = None
    shared_gate: str | None = None


@dataclass(frozen=True)
class Family:
    """The names of one model family in Hugging Face files. The defaults are Llama's, which most others kept."""

    model_type: str
    """`model_type` of the Hugging Face config."""
    moe: MoENames | None = None
    mlp: MLPNames = MLPNames()
    ignored: tuple[tuple[str, str], ...] = (
        (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", "rotary frequencies are computed from the config"),
    )
    """Tensors that files may hold and loading need not use: (regular expression of the whole name, reason)."""

    def mappings(self, shape: ModelShape) -> tuple[WeightMapping, ...]:
        """One mapping a Megatron parameter of the whole model, in the model's order."""
        return tuple(self._mappings(shape))

    def _mappings(self, shape: ModelShape) -> Iterator[WeightMapping]:
        embedding, table = "model.embed_tokens.weight", (shape.vocab, shape.hidden)
        yield VocabParallel("embedding.word_embeddings.weight", embedding, table)
        for layer, is_moe in enumerate(shape.moe_layers):
            yield from self._attention(shape, layer)
            yield from self._moe(shape, layer) if is_moe else self._dense_mlp(shape, layer)
        yield Replicated("decoder.final_layernorm.weight", "model.norm.weight", (shape.hidden,))
        if shape.tied_embeddings:
            yield TiedOutput("output_layer.weight", embedding, table)
        else:
            yield VocabParallel("output_layer.weight", "lm_head.weight", table)

    def _attention(self, shape: ModelShape, layer: int) -> Iterator[WeightMapping]:
        ours, theirs = f"decoder.layers.{layer}", f"model.layers.{layer}"
        attention, hf_attention = f"{ours}.self_attention", f"{theirs}.self_attn"
        yield Replicated(f"{ours}.input_layernorm.weight", f"{theirs}.input_layernorm.weight", (shape.hidden,))
        heads = (shape.n_heads, shape.n_kv_heads, shape.head_dim)
        features_of: dict[str, tuple[int, ...]] = {"weight": (shape.hidden,)}
        if shape.qkv_bias:
            features_of["bias"] = ()
        for kind, features in features_of.items():
            q, k, v = (f"{hf_attention}.{letter}_proj.{kind}" for letter in "qkv")
            yield QKV(f"{attention}.linear_qkv.{kind}", q, k, v, *heads, features)
        if shape.qk_norm:
            for letter in "qk":
                name, hf = f"{attention}.{letter}_layernorm.weight", f"{hf_attention}.{letter}_norm.weight"
                yield Replicated(name, hf, (shape.head_dim,))
        width = shape.n_heads * shape.head_dim
        yield Row(f"{attention}.linear_proj.weight", f"{hf_attention}.o_proj.weight", (shape.hidden, width))
        hf_norm = f"{theirs}.post_attention_layernorm.weight"
        yield Replicated(f"{ours}.pre_mlp_layernorm.weight", hf_norm, (shape.hidden,))

    def _dense_mlp(self, shape: ModelShape, layer: int) -> Iterator[WeightMapping]:
        yield from _mlp(
            f"decoder.layers.{layer}.mlp", f"model.layers.{layer}", self.mlp, shape.hidden, shape.ffn_hidden
        )

    def _moe(self, shape: ModelShape, layer: int) -> Iterator[WeightMapping]:
        ours, theirs, names = f"decoder.layers.{layer}.mlp", f"model.layers.{layer}", self.moe
        if names is None:
            raise ValueError(f"layer {layer} has experts, but model family {self.model_type!r} names none")
        n, ffn, hidden = shape.n_experts, shape.expert_ffn_hidden, shape.hidden
        yield Replicated(f"{ours}.router.weight", f"{theirs}.{names.router}", (n, hidden))
        gate, up = f"{theirs}.{names.expert.gate}", f"{theirs}.{names.expert.up}"
        yield ExpertGatedMLP(f"{ours}.experts.weight1", gate, up, n, (ffn, hidden))
        yield ExpertRow(f"{ours}.experts.weight2", f"{theirs}.{names.expert.down}", n, (hidden, ffn))
        if names.shared is not None:
            yield from _mlp(f"{ours}.shared_experts", theirs, names.shared, hidden, shape.shared_expert_ffn_hidden)
        if names.shared_gate is not None:
            yield Replicated(f"{ours}.shared_experts.gate_weight", f"{theirs}.{names.shared_gate}", (1, hidden))


def _mlp(ours: str, theirs: str, names: MLPNames, hidden: int, ffn: int) -> Iterator[WeightMapping]:
    yield GatedMLP(f"{ours}.linear_fc1.weight", f"{theirs}.{names.gate}", f"{theirs}.{names.up}", (ffn, hidden))
    yield Row(f"{ours}.linear_fc2.weight", f"{theirs}.{names.down}", (hidden, ffn))
