"""Bytes that one layer keeps for its backward pass, and bytes that its passes need temporarily.

Counted are the tensors that autograd saves, each storage once:

    x ─norm─> n ─qkv─> (p) ─> q k v ─attention─> o ─proj─> + x1 ─norm─> n1 ─> MLP: gate_up, activation   ─> + x'
    *         *        *      * * *              *           *          *     MoE: rows, gate_up, product

Sequence parallelism divides the residual stream (x, n, x1, n1, rows) by tp; heads and widths divide the rest. Experts
are assumed to be evenly loaded. A rank whose experts draw 20% more tokens than average needs 20% more for its rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from fivefold.config.schema.megatron import RecomputeModule
from fivefold.families.delta_net import CHUNK, DeltaNet
from fivefold.families.shape import LayerSort, ModelShape
from fivefold.families.tensors import WeightTensor
from fivefold.layout.parallel import ParallelLayout
from fivefold.planning.dropout import dropped_bytes, is_of_experts
from fivefold.planning.workload import Workload

_FLOAT, _INDEX = 4, 8


@dataclass(frozen=True)
class LayerCosts:
    """Bytes of one layer and one micro-batch on one rank."""

    input: int
    """The incoming residual stream, the only tensor that full recomputation keeps."""
    attention: int
    """What the first half saves: norm, attention and projections, including `input`."""
    mlp_input: int
    """What is saved between the halves: the residual stream and its norm, where selective recomputation starts."""
    mlp: int
    """What the second half saves after its norm."""
    core_attention: int
    """What attention saves between its projections, without their inputs and outputs."""
    expert_activation: int
    """The experts' activation, which the down projection saves."""
    shared_expert: int
    """What a shared expert saves."""
    attention_backward: int
    """Peak of the first half's backward pass on top of what is saved."""
    mlp_forward: int
    """Peak of the second half's forward pass on top of what is saved."""
    mlp_backward: int
    """Peak of the second half's backward pass on top of what is still saved then."""

    @property
    def saved(self) -> int:
        """Bytes that the layer saves without recomputation."""
        return self.attention + self.mlp_input + self.mlp

    def module_bytes(self, module: RecomputeModule, *, is_moe: bool) -> int:
        """Return the bytes that are not saved if a module is recomputed."""
        return {
            "core_attn": self.core_attention,
            "layernorm": 2 * self.input,
            "mlp": 0 if is_moe else self.mlp,
            "moe": self.mlp if is_moe else 0,
            "moe_act": self.expert_activation if is_moe else 0,
            "shared_experts": self.shared_expert if is_moe else 0,
        }[module]


def layer_costs(
    shape: ModelShape, layout: ParallelLayout, work: Workload, *, is_moe: bool, is_delta: bool = False
) -> LayerCosts:
    """Return the costs of an MoE layer or a dense one, with attention or a gated delta net."""
    tokens = work.tokens_per_micro_batch / layout.cp
    stream = tokens / layout.tp * shape.hidden * work.element_bytes
    if is_delta and shape.delta is not None:
        attention, attention_backward = delta_net_bytes(shape.delta, layout, work, tokens)
        projections = work.element_bytes * tokens * (shape.delta.input_width + shape.delta.value_width) / layout.tp
    else:
        attention, attention_backward = _attention(shape, layout, work, tokens)
        projections = _projections(shape, layout, work, tokens)
    mlp, mlp_forward, mlp_backward = (_moe if is_moe else _dense_mlp)(shape, layout, work, tokens)
    statistics = 2 * tokens / layout.tp * _FLOAT
    sort = LayerSort(is_moe=is_moe, is_delta=is_delta)
    dropped = dropped_bytes(shape, sort, work.element_bytes, partial(_adapter_tokens, shape, layout, tokens))
    # A norm on an output keeps it in float32.
    normed = tokens / layout.tp * shape.hidden * _FLOAT if shape.sandwich_norms else 0.0
    return LayerCosts(
        input=int(stream),
        attention=int(2 * stream + attention + statistics + normed + dropped.mixer),
        mlp_input=int(2 * stream),
        mlp=int(mlp + normed + dropped.mlp),
        attention_backward=int(attention_backward + 2 * stream),
        core_attention=max(0, int(attention - projections)),
        expert_activation=int(_expert_activation(shape, layout, work, tokens)) if is_moe else 0,
        shared_expert=int(_shared_expert(shape, layout, work, tokens)) if is_moe else 0,
        mlp_forward=int(mlp_forward + stream),
        mlp_backward=int(mlp_backward + 2 * stream),
    )


def _adapter_tokens(shape: ModelShape, layout: ParallelLayout, tokens: float, a: WeightTensor) -> float:
    """Return the inputs of an adapter on a rank, divided by their width."""
    own = tokens / layout.tp
    if not is_of_experts(a):
        return own
    return own * shape.top_k * (1 if a.cut == "columns" else layout.etp)


def _attention(shape: ModelShape, layout: ParallelLayout, work: Workload, tokens: float) -> tuple[float, float]:
    """Return the bytes between the norm and the residual sum: (saved, needed by the backward pass)."""
    element, tp = work.element_bytes, layout.tp
    keys, padding = shape.key_width + shape.value_width, _padding(shape, work)
    joint = shape.query_width + keys
    key_tokens = tokens * layout.seen_tokens
    saved = element * (tokens * (shape.query_width + shape.output_width) + key_tokens * keys) / tp
    saved += _FLOAT * tokens * shape.n_heads / tp
    if shape.wide_qk_norm:
        # Queries and keys in float32, and rounded before they are multiplied by the weight.
        saved += (_FLOAT + element) * tokens * (shape.query_width + shape.key_width) / tp
    elif shape.qk_norm:
        saved += element * tokens * joint / tp
        if shape.latent is None and (shape.zero_centered_norms or shape.rotated_channels < shape.head_dim):
            # The kernel that splits the joint projection rotates all channels, with norms of w. PyTorch also copies the
            # queries; for norms of 1 + w it has queries and keys in float32, and not the joint projection.
            saved += element * tokens * shape.query_width / tp
    if shape.output_gate:
        # The gate's sigmoid and the product; the output is kept anyway.
        saved += 2 * element * tokens * shape.output_width / tp
    if shape.latent is not None:
        saved += _latents(shape, layout, work, tokens)
        # Values share their storage with the keys without position, unless they are copied.
        saved += 0 if padding else element * key_tokens * shape.n_heads * shape.latent.nope_dim / tp
    if padding:
        # Zero-padded copies of values and output.
        saved += element * (tokens * (shape.output_width + padding) + key_tokens * padding) / tp
    # Gradients of the output, of q, k, v and of their joint projection, and of gates, twice; flash attention sums dq in
    # float32.
    gates = shape.query_rows - shape.query_width
    backward = (
        element * (tokens * (shape.output_width + shape.query_width + joint + 2 * gates) + key_tokens * keys) / tp
    )
    backward += _FLOAT * tokens * shape.query_width / tp
    backward += element * (tokens * (shape.output_width + padding) + key_tokens * padding) / tp if padding else 0
    if layout.cp > 1 and shape.latent is not None:
        # Also gradients of keys and values before their concatenation, for all tokens that the queries see.
        backward += element * (key_tokens - tokens) * keys / tp
        backward += element * (tokens * layout.cp + key_tokens) * shape.latent.shared_dim
    elif layout.cp > 1:
        backward += element * tokens * layout.cp * keys / tp
    return saved, backward


def delta_net_bytes(sizes: DeltaNet, layout: ParallelLayout, work: Workload, tokens: float) -> tuple[float, float]:
    """Return the bytes of a gated delta net between norm and residual sum: (saved, needed by the backward pass).

    Saved are the convolution's input and output, its activation, and of the value heads: outputs before and after the
    norm, the gate and its activation, their product, and betas and decays. The backward pass computes the chunks again
    in float32. At its peak there are, for each token of a value head, eleven tensors of keys, three and a half of
    values, five of products with the tokens of its chunk, and the states between the chunks, as counted on a CPU.

    The package fla-core saves, in place of the activation, queries and keys of length 1, and the products of each token
    with its chunk; its kernels then need less than the norm and the gate.
    """
    element, heads, own = work.element_bytes, sizes.n_value_heads, tokens / layout.tp
    saved = own * element * 2 * sizes.convolved_width
    saved += own * heads * (sizes.value_dim * (3 * _FLOAT + 4 * element) + 4 * _FLOAT + 2 * element)
    if work.fla:
        saved += own * (2 * element * sizes.key_width + 2 * _FLOAT * sizes.n_key_heads + element * heads * CHUNK)
        return saved, own * heads * sizes.value_dim * (3 * _FLOAT + element)
    saved += own * element * sizes.convolved_width
    states = 1.1 * sizes.key_dim * sizes.value_dim / CHUNK
    of_chunks = 11 * sizes.key_dim + 2 * sizes.key_width / heads + 3.5 * sizes.value_dim + 5 * CHUNK + states
    return saved, _FLOAT * own * heads * of_chunks


def _padding(shape: ModelShape, work: Workload) -> int:
    """Return the zero channels that FlashAttention 2 needs to make value heads as wide as query heads."""
    return 0 if work.attn_impl == "flash_attention_4" else max(0, shape.query_width - shape.output_width)


def _latents(shape: ModelShape, layout: ParallelLayout, work: Workload, tokens: float) -> float:
    """Return the bytes that are saved before the up projections: latents before and after their norms."""
    latent = shape.latent
    assert latent is not None
    own = 2 * latent.latent_dim + latent.rope_dim
    if layout.cp == 1:
        return work.element_bytes * tokens / layout.tp * own
    # Latents of keys and values are gathered after their norm, and saved in gathered form.
    gathered = layout.seen_tokens * latent.shared_dim
    return work.element_bytes * tokens * ((own - latent.kv_rank) / layout.tp + gathered)


def _projections(shape: ModelShape, layout: ParallelLayout, work: Workload, tokens: float) -> float:
    """Return the bytes from which attention is recomputed, and of the output projection's input."""
    rows, keys, latents = work.element_bytes * tokens, shape.key_width + shape.value_width, 0.0
    if (latent := shape.latent) is not None:
        latents = _latents(shape, layout, work, tokens)
        # With context parallelism, keys and values are recomputed too. All heads share the keys' part with position.
        keys = 0 if layout.cp > 1 else keys + (layout.tp - shape.n_heads) * latent.rope_dim
    return latents + rows * (shape.query_rows + keys + shape.output_width) / layout.tp


def _expert_activation(shape: ModelShape, layout: ParallelLayout, work: Workload, tokens: float) -> float:
    rows = tokens / layout.tp * shape.top_k * layout.etp
    return rows * work.element_bytes * shape.expert_ffn_hidden / layout.etp


def _shared_expert(shape: ModelShape, layout: ParallelLayout, work: Workload, tokens: float) -> float:
    """Return the bytes that a shared expert saves: like a dense MLP of its width, plus the gate's product."""
    if not shape.shared_expert_ffn_hidden:
        return 0.0
    widths = _saved_widths(work) * shape.shared_expert_ffn_hidden / layout.tp
    return work.element_bytes * tokens * (widths + shape.hidden / layout.tp)


def _saved_widths(work: Workload) -> int:
    """Return the widths that a gated MLP saves: gate, up, product; if unfused, also silu(gate) and a copy of up."""
    return 3 if work.fused_activation else 5


def _dense_mlp(shape: ModelShape, layout: ParallelLayout, work: Workload, tokens: float) -> tuple[float, float, float]:
    """Return the bytes of a dense MLP: (saved, forward, backward).

    It saves gate_up (2 widths), silu(gate), a copy of up, and their product.
    """
    element = work.element_bytes
    width = shape.ffn_hidden / layout.tp
    rows = element * tokens
    saved = rows * _saved_widths(work) * width
    forward = rows * shape.hidden
    # Each projection's backward pass returns a gradient of undefined content, which only triggers the hook of
    # Megatron's DDP; the real one has been added to the float32 buffer.
    weight = element * width * shape.hidden
    gathered = rows * shape.hidden if layout.tp > 1 else 0
    down = gathered + rows * width + weight
    # Gradients of silu(gate), of up's copy and of gate, minus what is freed by then: the product, then these two.
    activation = 2 * rows * width
    up = rows * shape.hidden + 2 * weight - 3 * rows * width
    return saved, forward, max(down, activation, up)


def _moe(shape: ModelShape, layout: ParallelLayout, work: Workload, tokens: float) -> tuple[float, float, float]:
    """Return the bytes of router, dispatch, experts and shared expert: (saved, forward, backward)."""
    element = work.element_bytes
    gathered = tokens / layout.tp * layout.etp
    rows = gathered * shape.top_k
    row = element * shape.hidden
    width = element * shape.expert_ffn_hidden / layout.etp
    exchanges = layout.ep > 1
    indices = rows * (7 if exchanges else 5) * _INDEX
    saved = rows * (row + 3 * width + 2 * _FLOAT) + indices
    if shape.expert_clamp is not None:
        # Which expert's biases each row gets, for both projections.
        saved += 2 * rows * shape.n_experts / layout.ep * element
    # The frames of the forward pass hold the rows as sent and as received until the layer is done.
    forward = (4 if exchanges else 1) * rows * row
    # Slices of experts produce partial sums for the tokens of all their ranks, whose gradient is gathered again.
    sums = gathered * row if layout.etp > 1 else 0.0
    router = tokens / layout.tp * (_FLOAT * (shape.hidden + 3 * shape.n_experts))
    forward = max(forward + sums, router)
    # After the activation's backward pass, its gradient, the rows' gradient, and an empty gradient of the weight are
    # alive. The latter only triggers the hook: the kernel has added the real one. The activation's tensors are freed.
    weight = element * shape.n_experts / layout.ep * 2 * shape.expert_ffn_hidden / layout.etp * shape.hidden
    backward = weight + rows * (row + 2 * width) - rows * 3 * width
    backward = max(backward, weight + rows * (row + width), (3 if exchanges else 1) * rows * row - rows * 3 * width)
    backward += sums
    if shape.shared_expert_ffn_hidden:
        saved += _shared_expert(shape, layout, work, tokens)
    return saved, forward, backward


def head_bytes(shape: ModelShape, layout: ParallelLayout, work: Workload) -> int:
    """Return the bytes that are alive while the last stage turns hidden states into log-probs and back.

    These are three tensors of hidden states (normalized, of trained tokens, and their gradient), and logits: a chunk in
    float32, the previous chunk until its name is rebound, and a gradient; or the logits of all tokens, if the backward
    pass does not recompute them. A value head has no logits, but two more tensors of hidden states in float32.
    """
    element = work.element_bytes
    tokens = work.tokens_per_micro_batch / layout.cp
    vocabulary = -(-shape.vocab // layout.tp)
    chunk = min(work.logprob_chunk, tokens)
    hidden = element * shape.hidden * (3 * tokens + (tokens / layout.tp if layout.tp > 1 else 0))
    if shape.value_head:
        return int(hidden + tokens * _FLOAT * (2 * shape.hidden + 6))
    kept = 0 if work.logprob_recompute else tokens * vocabulary * _FLOAT
    gradient = chunk * vocabulary * element
    logits = max(kept, 2 * chunk * vocabulary * _FLOAT) + gradient
    in_hook = max(kept, chunk * vocabulary * _FLOAT) + gradient + element * vocabulary * shape.hidden
    return int(hidden + max(logits, in_hook) + 6 * _FLOAT * tokens)
