"""The tensors of a model's Hugging Face files: the one list that weight mappings, optimizers and plans read.

ModelShape ──tensors──> name, full shape, cut       in the model's order
names ──Trained──> the tensors that a run trains
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod
from typing import Literal

from fivefold.families.adapters import MATRICES, AdapterShape, Matrix, adapter_name, shared_name
from fivefold.families.delta_net import DeltaNet
from fivefold.families.family import Family, JointNames, MLPNames
from fivefold.families.latent import LatentAttention
from fivefold.families.registry import find_family
from fivefold.families.shape import ModelShape

Shape = tuple[int, ...]
Cut = Literal["whole", "rows", "columns", "vocabulary"]
"""How tensor parallelism cuts a tensor: not at all, its rows (outputs), its columns (inputs), or its rows, padded to a
multiple of the ranks, as the vocabulary is."""

_EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"
VALUE_WEIGHT, VALUE_BIAS = "score.weight", "score.bias"
"""A value head: the names of a model for token classification with one label. A model for sequence classification,
which a reward model is, has the weight alone."""


@dataclass(frozen=True)
class WeightTensor:
    """One tensor of a model, or the same tensor of all experts of a layer."""

    name: str
    """Hugging Face name; of experts, a pattern with an `{expert}` field."""
    shape: Shape
    """Full shape; of one expert."""
    cut: Cut = "whole"
    layer: int | None = None
    """None outside the layers."""
    n_experts: int | None = None
    """Experts that have such a tensor; None for a tensor that belongs to no expert."""
    runs: tuple[int, ...] = ()
    """Rows of each part of a tensor whose parts are cut each by itself, such as keys and values; empty: one part."""
    is_joint: bool = False
    """Whether files hold all experts' tensors in one, along a further first dimension."""
    keeps_float32: bool = False
    """Whether it is float32 whatever the dtype of the model: offsets of routers, which no gradient changes."""
    adapts: str | None = None
    """Name of the weight whose adapter it is part of; None: it is part of the model itself."""
    shared_by: int | None = None
    """Experts whose adapters have the matrix in common; None: it is no such matrix."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the name, or the names of all experts' tensors."""
        if self.n_experts is None:
            return (self.name,)
        return tuple(self.name.format(expert=expert) for expert in range(self.n_experts))

    @property
    def as_linear(self) -> tuple[int, int, Cut]:
        """Return the outputs and inputs of a weight, and how it is cut as [outputs, inputs]."""
        if not self.is_joint:
            return (*self.shape, self.cut)  # type: ignore[return-value]  # of two dimensions
        inputs, outputs = self.shape
        return outputs, inputs, "rows" if self.cut == "columns" else "columns"

    @property
    def in_files(self) -> dict[str, Shape]:
        """Return the names and full shapes of what files hold: of this tensor, or of all experts' tensors."""
        if self.is_joint and self.n_experts is not None:
            return {joint_name(self.name): (self.n_experts, *self.shape)}
        return dict.fromkeys(self.names, self.shape)

    @property
    def names_in_peft(self) -> tuple[str, ...]:
        """Return the names of a matrix of an adapter in a folder of PEFT, which has a copy of it for each expert."""
        if self.shared_by is None:
            return self.names
        [matrix] = (matrix for matrix in MATRICES if self.name == shared_name(str(self.adapts), matrix))
        return tuple(adapter_name(str(self.adapts).format(expert=e), matrix) for e in range(self.shared_by))

    def elements(self, ranks: int) -> int:
        """Return the elements, padding included, that each of `ranks` tensor-parallel ranks has; of one expert."""
        rows, width = self.shape[0], prod(self.shape[1:])
        if self.cut == "vocabulary":
            return -(-rows // ranks) * width
        return rows * width // (1 if self.cut == "whole" else ranks)


def joint_name(pattern: str) -> str:
    """Return the name of the tensor of all experts in files, of the pattern of each expert's name."""
    return pattern.replace("{expert}.", "")


@dataclass(frozen=True)
class Trained:
    """Which tensors of a model are trained: those that match a pattern of `only`, and none of `frozen`.

    Frozen tensors have no gradient buffer, no optimizer state and no part in checkpoints.
    """

    frozen: tuple[str, ...] = ()
    """Patterns of Hugging Face names, with `*`, `?` and `[...]` as in the shell."""
    only: tuple[str, ...] = ("*",)
    """Patterns of the names that may be trained."""

    def __contains__(self, name: str) -> bool:
        return _matches(name, self.only) and not _matches(name, self.frozen)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


ALL, NONE = Trained(), Trained(("*",))
ADAPTERS = Trained(only=(adapter_name("*", "A"), adapter_name("*", "B"), VALUE_WEIGHT, VALUE_BIAS))
"""The adapters, and a value head, which begins at 0."""


def trained_tensors(shape: ModelShape) -> Trained:
    """Return which tensors of a model are trained: its adapters, or without them all that are not frozen."""
    return Trained(shape.frozen) if shape.adapters is None else ADAPTERS


def embedding(shape: ModelShape) -> str:
    """Return the name of the embedding."""
    return find_family(shape.family).in_files(_EMBEDDING)


def tensors(shape: ModelShape) -> tuple[WeightTensor, ...]:
    """Return the tensors of a model, in its order; each weight that has an adapter comes before it.

    Raises:
        ValueError: a family that is not known, or one that names no experts where the shape has them.
    """
    family = find_family(shape.family)
    own = (replace(tensor, name=family.in_files(tensor.name)) for tensor in _tensors(shape, family))
    if shape.adapters is None:
        return tuple(own)
    return tuple(each for tensor in own for each in (tensor, *_adapter(tensor, shape.adapters)))


def kept_tensors(shape: ModelShape) -> dict[str, Shape]:
    """Return the names and shapes of the tensors that a language model needs besides, and keeps as they are."""
    if shape.indexer is None or shape.value_head:
        return {}
    of_layer = shape.indexer.tensors(shape.hidden)
    return {
        f"model.layers.{layer}.self_attn.indexer.{name}": full
        for layer, has_indexer in enumerate(shape.indexer.layers)
        if has_indexer
        for name, full in of_layer.items()
    }


def _adapter(tensor: WeightTensor, adapters: AdapterShape) -> Iterator[WeightTensor]:
    """Yield the matrices of a weight's adapter: A sees the weight's inputs, and B makes its outputs."""
    rank = adapters.rank_of(tensor.name, of_expert=tensor.n_experts is not None)
    if rank is not None:
        outputs, inputs, of_weight = tensor.as_linear
        forms: dict[Matrix, tuple[Shape, Cut]] = {
            "A": ((rank, inputs), "columns" if of_weight == "columns" else "whole"),
            "B": ((outputs, rank), "rows" if of_weight == "rows" else "whole"),
        }
        for matrix, (shape, cut) in forms.items():
            runs = tensor.runs if matrix == "B" else ()
            part = replace(tensor, adapts=tensor.name, shape=shape, cut=cut, runs=runs, is_joint=False)
            # What tensor parallelism leaves whole is on the side of the hidden states.
            if adapters.shares_outer and tensor.n_experts is not None and cut == "whole":
                shared = shared_name(tensor.name, matrix)
                yield replace(part, name=shared, n_experts=None, shared_by=tensor.n_experts)
            else:
                yield replace(part, name=adapter_name(tensor.name, matrix))


def _tensors(shape: ModelShape, family: Family) -> Iterator[WeightTensor]:
    table = (shape.vocab, shape.hidden)
    yield WeightTensor(_EMBEDDING, table, "vocabulary")
    for layer, is_moe in enumerate(shape.moe_layers):
        yield _norm(f"model.layers.{layer}.input_layernorm.weight", shape.hidden, layer)
        if shape.layer_kinds[layer] == "delta" and shape.delta is not None:
            yield from _delta_net(shape.hidden, shape.delta, layer)
        else:
            yield from _attention(shape, layer)
        yield _norm(f"model.layers.{layer}.post_attention_layernorm.weight", shape.hidden, layer)
        if shape.sandwich_norms:
            yield _norm(f"model.layers.{layer}.pre_feedforward_layernorm.weight", shape.hidden, layer)
        if is_moe:
            yield from _moe(shape, family, layer)
        else:
            yield from _mlp(family.mlp, shape.hidden, shape.ffn_hidden, layer)
        if shape.sandwich_norms:
            yield _norm(f"model.layers.{layer}.post_feedforward_layernorm.weight", shape.hidden, layer)
    yield WeightTensor("model.norm.weight", (shape.hidden,))
    if shape.value_head:
        yield WeightTensor(VALUE_WEIGHT, (1, shape.hidden))
        if shape.value_bias:
            yield WeightTensor(VALUE_BIAS, (1,))
    elif not shape.tied_embeddings:
        yield WeightTensor(OUTPUT, table, "vocabulary")


def _norm(name: str, width: int, layer: int) -> WeightTensor:
    return WeightTensor(name, (width,), layer=layer)


def _attention(shape: ModelShape, layer: int) -> Iterator[WeightTensor]:
    attention = f"model.layers.{layer}.self_attn"
    if shape.latent is not None:
        yield from _latents(shape, shape.latent, attention, layer)
    else:
        widths = {"q": shape.query_rows, "k": shape.key_width, "v": shape.value_width}
        for letter, width in widths.items():
            yield WeightTensor(f"{attention}.{letter}_proj.weight", (width, shape.hidden), "rows", layer)
        if shape.qkv_bias:
            for letter, width in widths.items():
                yield WeightTensor(f"{attention}.{letter}_proj.bias", (width,), "rows", layer)
        if shape.wide_qk_norm:
            for letter, width in (("q", shape.query_width), ("k", shape.key_width)):
                yield WeightTensor(f"{attention}.{letter}_norm.weight", (width,), "rows", layer)
        elif shape.qk_norm:
            yield from (_norm(f"{attention}.{letter}_norm.weight", shape.head_dim, layer) for letter in "qk")
    if shape.sinks:
        yield WeightTensor(f"{attention}.sinks", (shape.n_heads,), "rows", layer)
    yield WeightTensor(f"{attention}.o_proj.weight", (shape.hidden, shape.output_width), "columns", layer)
    if shape.output_bias:
        yield _norm(f"{attention}.o_proj.bias", shape.hidden, layer)


def _latents(shape: ModelShape, latent: LatentAttention, attention: str, layer: int) -> Iterator[WeightTensor]:
    """Yield the projections of multi-head latent attention: those down are whole on every rank, those up are cut."""
    hidden, rank = shape.hidden, latent.query_rank
    up = shape.n_heads * (latent.nope_dim + latent.value_dim)
    if rank is not None:
        yield WeightTensor(f"{attention}.q_a_proj.weight", (rank, hidden), layer=layer)
    yield WeightTensor(f"{attention}.kv_a_proj_with_mqa.weight", (latent.shared_dim, hidden), layer=layer)
    if rank is None:
        yield WeightTensor(f"{attention}.q_proj.weight", (shape.query_width, hidden), "rows", layer)
    else:
        yield _norm(f"{attention}.q_a_layernorm.weight", rank, layer)
        yield WeightTensor(f"{attention}.q_b_proj.weight", (shape.query_width, rank), "rows", layer)
    yield _norm(f"{attention}.kv_a_layernorm.weight", latent.kv_rank, layer)
    yield WeightTensor(f"{attention}.kv_b_proj.weight", (up, latent.kv_rank), "rows", layer)


def _delta_net(hidden: int, delta: DeltaNet, layer: int) -> Iterator[WeightTensor]:
    """Yield what one gated delta net is made of. Tensor parallelism divides the heads."""
    prefix, key, value, heads = (
        f"model.layers.{layer}.linear_attn",
        delta.key_width,
        delta.value_width,
        delta.n_value_heads,
    )
    convolved = (key, key, value)
    yield WeightTensor(f"{prefix}.dt_bias", (heads,), "rows", layer)
    yield WeightTensor(f"{prefix}.A_log", (heads,), "rows", layer)
    yield WeightTensor(f"{prefix}.conv1d.weight", (sum(convolved), 1, delta.kernel), "rows", layer, runs=convolved)
    if delta.is_grouped:
        yield WeightTensor(f"{prefix}.in_proj_qkvz.weight", (sum(convolved) + value, hidden), "rows", layer)
        yield WeightTensor(f"{prefix}.in_proj_ba.weight", (2 * heads, hidden), "rows", layer)
    else:
        yield WeightTensor(f"{prefix}.in_proj_qkv.weight", (sum(convolved), hidden), "rows", layer, runs=convolved)
        yield WeightTensor(f"{prefix}.in_proj_z.weight", (value, hidden), "rows", layer)
        yield WeightTensor(f"{prefix}.in_proj_b.weight", (heads, hidden), "rows", layer)
        yield WeightTensor(f"{prefix}.in_proj_a.weight", (heads, hidden), "rows", layer)
    yield _norm(f"{prefix}.norm.weight", delta.value_dim, layer)
    yield WeightTensor(f"{prefix}.out_proj.weight", (hidden, value), "columns", layer)


def _mlp(names: MLPNames, hidden: int, ffn: int, layer: int, n_experts: int | None = None) -> Iterator[WeightTensor]:
    """Yield a gated MLP: dense, the shared expert, or all routed experts."""
    for name in (names.gate, names.up):
        yield WeightTensor(f"model.layers.{layer}.{name}", (ffn, hidden), "rows", layer, n_experts)
    yield WeightTensor(f"model.layers.{layer}.{names.down}", (hidden, ffn), "columns", layer, n_experts)


def _moe(shape: ModelShape, family: Family, layer: int) -> Iterator[WeightTensor]:
    prefix, names, hidden = f"model.layers.{layer}", family.moe, shape.hidden
    if names is None:
        raise ValueError(f"{prefix} has experts, but the model family {family.model_type!r} names none")
    yield WeightTensor(f"{prefix}.{names.router}", (shape.n_experts, hidden), layer=layer)
    if names.shift is not None:
        yield WeightTensor(f"{prefix}.{names.shift}", (shape.n_experts,), layer=layer)
    if names.bias is not None:
        yield WeightTensor(f"{prefix}.{names.bias}", (shape.n_experts,), layer=layer, keeps_float32=True)
    if names.joint is not None:
        yield from _joint_experts(names.joint, shape, layer)
    else:
        yield from _mlp(names.expert, hidden, shape.expert_ffn_hidden, layer, shape.n_experts)
    if names.shared is not None:
        yield from _mlp(names.shared, hidden, shape.shared_expert_ffn_hidden, layer)
    if names.shared_gate is not None:
        yield WeightTensor(f"{prefix}.{names.shared_gate}", (1, hidden), layer=layer)


def _joint_experts(names: JointNames, shape: ModelShape, layer: int) -> Iterator[WeightTensor]:
    """Yield the tensors of experts with biases, whose weights are [in, out]. Tensor parallelism divides the channels
    between the two projections."""
    hidden, ffn = shape.hidden, shape.expert_ffn_hidden
    forms: dict[str, tuple[Shape, Cut]] = {
        names.gate_up: ((hidden, 2 * ffn), "columns"),
        names.gate_up_bias: ((2 * ffn,), "rows"),
        names.down: ((ffn, hidden), "rows"),
        names.down_bias: ((hidden,), "whole"),
    }
    for name, (full, cut) in forms.items():
        yield WeightTensor(f"model.layers.{layer}.{name}", full, cut, layer, shape.n_experts, is_joint=True)
