"""The skeleton that the families share, as a `config.json` describes it.

read_dense    sizes, heads, rotary positions; refuses what would change the outputs and is not implemented
read_hybrid   a dense decoder with gated delta nets in place of attention in some of its layers
add_experts   a dense decoder with a mixture of experts in some of its layers
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from fivefold.families.delta_net import read_delta_layers, read_delta_net
from fivefold.families.hf_config import HFConfig
from fivefold.families.latent import LatentAttention
from fivefold.families.rope import read_rope, rotary_part
from fivefold.families.shape import ModelShape


def read_dense(
    config: HFConfig,
    *,
    has_window: bool = False,
    window_layers: Sequence[bool] = (),
    knows_attention_bias: bool = True,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    is_rotated_in_part: bool = False,
    kinds: Collection[str] = (),
    activation: tuple[str, str] = ("hidden_act", "silu"),
    rope_kind: str | None = None,
    latent: LatentAttention | None = None,
) -> ModelShape:
    """Return the shape of a decoder whose layers all have a dense MLP.

    Args:
        config: the model's config.json.
        has_window: whether the family's own keys give a layer a sliding window, which is not implemented for the
            family; `layer_types` is checked in any case.
        window_layers: which layers have a sliding window of `sliding_window` tokens, in other families.
        knows_attention_bias: whether `attention_bias` is a key of the family; else it is ignored.
        qkv_bias: whether Q, K and V have biases (and the output projection none).
        qk_norm: whether there is a norm on each query and key head.
        is_rotated_in_part: whether rotary positions turn a share of each head's channels.
        kinds: what `layer_types` may call a layer, besides `full_attention` and layers with a sliding window.
        activation: the key with the activation of the MLPs, and the only value that the family may have there.
        rope_kind: the kind of layer whose rotary positions are read, where kinds have different ones.
        latent: sizes of multi-head latent attention; None for grouped-query attention.

    Raises:
        ValueError: a feature that is not implemented, or a key that is missing or inconsistent.
    """
    _refuse_unsupported(config, *activation, knows_attention_bias=knows_attention_bias)
    _check_kinds(config, window_layers, kinds, has_window=has_window)
    n_layers, hidden, n_heads = (
        config.integer(key) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    theta, scaling = read_rope(config, is_partial=is_rotated_in_part, kind=rope_kind)
    # In files of models with latent attention, head_dim means something else.
    head_dim = _head_dim(config, hidden, n_heads) if latent is None else latent.qk_dim
    return ModelShape(
        family=config.family,
        n_layers=n_layers,
        hidden=hidden,
        n_heads=n_heads,
        n_kv_heads=_kv_heads(config, n_heads),
        head_dim=head_dim,
        ffn_hidden=config.integer("intermediate_size"),
        vocab=config.integer("vocab_size"),
        max_positions=config.integer("max_position_embeddings"),
        n_experts=0,
        top_k=0,
        expert_ffn_hidden=0,
        shared_expert_ffn_hidden=0,
        moe_layers=(False,) * n_layers,
        norm_topk_prob=False,
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        tied_embeddings=config.flag("tie_word_embeddings"),
        rms_norm_eps=config.number("rms_norm_eps"),
        rope_theta=theta,
        rope_scaling=scaling,
        rotary_dim=rotary_part(config, head_dim) if is_rotated_in_part else None,
        latent=latent,
        window=config.integer("sliding_window") if any(window_layers) else None,
        window_layers=tuple(window_layers) if any(window_layers) else (),
    )


HYBRID_DEFAULTS = {
    "full_attention_interval": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.25,
}
"""What transformers takes for keys that the config of a hybrid decoder leaves out."""


def read_hybrid(config: HFConfig, *, is_grouped: bool) -> ModelShape:
    """Read a dense decoder of gated delta nets and attention with output gates; `is_grouped` as in `DeltaNet`.

    Raises:
        ValueError: as `read_dense`; or sizes or kinds of layers that are missing or inconsistent.
    """
    dense = read_dense(config, kinds={"linear_attention"}, qk_norm=True, is_rotated_in_part=True)
    return replace(
        dense,
        delta=read_delta_net(config, is_grouped=is_grouped),
        delta_layers=read_delta_layers(config, dense.n_layers),
        output_gate=True,
        zero_centered_norms=True,
    )


def add_experts(
    dense: ModelShape,
    config: HFConfig,
    *,
    moe_layers: Sequence[bool],
    width_key: str,
    norm_topk_prob: bool,
    gated_shared_key: str | None = None,
) -> ModelShape:
    """Return `dense` with a mixture of experts in `moe_layers`.

    Args:
        dense: what the config says apart from experts.
        config: the model's config.json.
        moe_layers: which layers have experts, one entry a layer.
        width_key: the key with the width of a routed expert.
        norm_topk_prob: whether the weights of the chosen experts are scaled to sum to 1.
        gated_shared_key: the key with the width of a shared expert that a sigmoid gate scales; None without one.

    Raises:
        ValueError: a key that is missing or inconsistent.
    """
    shape = replace(dense, norm_topk_prob=norm_topk_prob)
    if not any(moe_layers):
        return shape
    shared = config.integer(gated_shared_key) if gated_shared_key else 0
    return replace(
        shape,
        moe_layers=tuple(moe_layers),
        n_experts=_n_experts(config),
        top_k=config.integer("num_experts_per_tok"),
        expert_ffn_hidden=config.integer(width_key),
        shared_expert_ffn_hidden=shared,
        shared_expert_gate=shared > 0,
    )


def sparse_layers(config: HFConfig) -> tuple[bool, ...]:
    """Return which layers have experts by `decoder_sparse_step` and `mlp_only_layers`; none if there are 0 experts.

    Raises:
        ValueError: a key that is missing or inconsistent.
    """
    n_layers, step = config.integer("num_hidden_layers"), config.integer("decoder_sparse_step")
    dense = config.items("mlp_only_layers", int)
    has_experts = _n_experts(config, least=0) > 0
    return tuple(has_experts and layer not in dense and (layer + 1) % step == 0 for layer in range(n_layers))


def uses_window(config: HFConfig) -> bool:
    """Return whether `sliding_window` is set and `use_sliding_window` turns it on."""
    return config.get("sliding_window") is not None and config.flag("use_sliding_window")


def lists_layers(config: HFConfig) -> bool:
    """Return whether the file lists the kind of each layer in `layer_types`, which `read_dense` looks at."""
    return bool(config.items("layer_types", str))


def has_window_above(config: HFConfig) -> bool:
    """Return whether the layers from `max_window_layers` on attend to a sliding window, and there are any."""
    if not uses_window(config) or lists_layers(config):
        return False
    return config.integer("num_hidden_layers") > config.integer("max_window_layers", least=0)


def check_groups(config: HFConfig, shape: ModelShape) -> None:
    """Check the groups of experts of a shape.

    Raises:
        ValueError: the groups are not equal, or the groups of a token have too few experts.
    """
    groups, chosen = shape.expert_groups, shape.groups_per_token
    size, rest = divmod(shape.n_experts, groups)
    if groups > 1 and (rest or size < shape.group_best or chosen > groups or chosen * size < shape.top_k):
        raise config.error(
            f"n_group={groups} must divide the {shape.n_experts} experts into groups of at least {shape.group_best}, "
            f"and topk_group={chosen} be groups that have the {shape.top_k} experts of a token"
        )


def window_in_all(config: HFConfig) -> tuple[bool, ...]:
    """Return which layers have a sliding window: all, unless `sliding_window` is null."""
    return (config.get("sliding_window") is not None,) * config.integer("num_hidden_layers")


def listed_windows(config: HFConfig, otherwise: Sequence[bool]) -> tuple[bool, ...]:
    """Return which layers have a sliding window as `layer_types` lists them; `otherwise` where it is left out.

    Raises:
        ValueError: not one kind a layer.
    """
    kinds = config.items("layer_types", str)
    if kinds and len(kinds) != len(otherwise):
        raise config.error(f"layer_types has {len(kinds)} entries for num_hidden_layers={len(otherwise)}")
    return tuple(kind == "sliding_attention" for kind in kinds) or tuple(otherwise)


def _refuse_unsupported(config: HFConfig, key: str, activation: str, *, knows_attention_bias: bool) -> None:
    if (stated := config.get(key)) != activation:
        raise config.error(f"{key}={stated!r} is not supported; the MLPs are gated by {activation}")
    if knows_attention_bias and config.flag("attention_bias"):
        raise config.error("attention_bias=true (a bias on the output projection as well) is not supported")
    if config.flag("mlp_bias"):
        raise config.error("mlp_bias=true is not supported")
    if dropout := config.number("attention_dropout"):
        raise config.error(
            f"attention_dropout={dropout:g} is not supported, for attention drops nothing in training: set it to 0"
        )


def _check_kinds(
    config: HFConfig, window_layers: Sequence[bool], other_kinds: Collection[str], *, has_window: bool
) -> None:
    """Refuse kinds of layers that the family does not have."""
    listed = config.items("layer_types", str)
    kinds = set(listed).difference({"full_attention"}, other_kinds)
    if any(window_layers):
        kinds.discard("sliding_attention")
    if has_window or "sliding_attention" in kinds:
        raise config.error(
            f"attention over sliding_window={config.get('sliding_window')} tokens is in use; it is not supported: "
            "every layer attends to the whole sequence"
        )
    if kinds:
        raise config.error(f"layer_types has {', '.join(sorted(kinds))}, and only full_attention is supported")
    if any(window_layers) and listed and [kind == "sliding_attention" for kind in listed] != list(window_layers):
        raise config.error(
            f"layer_types differs from sliding_window={config.get('sliding_window')}, which holds for every layer in "
            "transformers: make them agree, or drop layer_types"
        )


def _kv_heads(config: HFConfig, n_heads: int) -> int:
    """Return the key/value heads; null means as many as query heads."""
    if config.get("num_key_value_heads") is None:
        return n_heads
    n_kv_heads = config.integer("num_key_value_heads")
    if n_heads % n_kv_heads:
        raise config.error(
            f"num_attention_heads={n_heads} is not a multiple of num_key_value_heads={n_kv_heads}, so the query heads "
            "cannot be grouped"
        )
    return n_kv_heads


def _head_dim(config: HFConfig, hidden: int, n_heads: int) -> int:
    """Return the width of a head: hidden / n_heads unless the file or the family says otherwise."""
    if config.get("head_dim") is not None:
        head_dim = config.integer("head_dim")
    elif hidden % n_heads:
        raise config.error(
            f"without head_dim, hidden_size={hidden} must be a multiple of num_attention_heads={n_heads}"
        )
    else:
        head_dim = hidden // n_heads
    if head_dim % 2:
        raise config.error(f"the head width is {head_dim}; rotary positions turn pairs, so it must be even")
    return head_dim


def _n_experts(config: HFConfig, least: int = 1) -> int:
    """Return the routed experts of a layer, under any of the keys in use."""
    keys = [key for key in ("num_experts", "num_local_experts", "n_routed_experts") if config.states(key)]
    counts = {config.integer(key, least) for key in keys}
    if len(counts) > 1:
        stated = " and ".join(f"{key}={config.get(key)}" for key in keys)
        raise config.error(f"{stated} differ; both are the number of experts of a layer")
    if not counts:
        raise config.error("config.json has neither num_experts nor num_local_experts nor n_routed_experts")
    n_experts = counts.pop()
    if n_experts and (top_k := config.integer("num_experts_per_tok")) > n_experts:
        raise config.error(f"num_experts_per_tok={top_k} exceeds the {n_experts} experts of a layer")
    return n_experts
