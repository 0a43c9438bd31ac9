"""DeepSeek-V3: the first layers dense, then experts beside a shared expert, multi-head latent attention throughout."""

from __future__ import annotations

from fivefold.families.family import Family
from fivefold.families.hf_config import HFConfig
from fivefold.families.shape import LatentAttention, ModelShape


def _read(config: HFConfig) -> ModelShape:
    """Read the sizes, which plans need; features that only a trained model would need are not looked at."""
    latent = LatentAttention(
        query_rank=config.integer("q_lora_rank"),
        kv_rank=config.integer("kv_lora_rank"),
        nope_dim=config.integer("qk_nope_head_dim"),
        rope_dim=config.integer("qk_rope_head_dim"),
        value_dim=config.integer("v_head_dim"),
    )
    n_layers, n_heads = config.integer("num_hidden_layers"), config.integer("num_attention_heads")
    n_dense, expert_width = config.integer("first_k_dense_replace", least=0), config.integer("moe_intermediate_size")
    return ModelShape(
        family=config.family,
        n_layers=n_layers,
        hidden=config.integer("hidden_size"),
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=latent.qk_dim,
        ffn_hidden=config.integer("intermediate_size"),
        vocab=config.integer("vocab_size"),
        max_positions=config.integer("max_position_embeddings"),
        n_experts=config.integer("n_routed_experts"),
        top_k=config.integer("num_experts_per_tok"),
        expert_ffn_hidden=expert_width,
        # Several shared experts are one that is as wide as all of them.
        shared_expert_ffn_hidden=config.integer("n_shared_experts", least=0) * expert_width,
        moe_layers=tuple(layer >= n_dense for layer in range(n_layers)),
        norm_topk_prob=config.flag("norm_topk_prob"),
        qkv_bias=False,
        qk_norm=False,
        tied_embeddings=config.flag("tie_word_embeddings"),
        rms_norm_eps=config.number("rms_norm_eps"),
        rope_theta=config.number("rope_theta"),
        rope_scaling=None,
        router_bias=True,
        latent=latent,
    )


DEEPSEEK_V3 = Family(
    "deepseek_v3",
    read=_read,
    defaults={"norm_topk_prob": True},
    untrained="there is no engine with multi-head latent attention",
)
