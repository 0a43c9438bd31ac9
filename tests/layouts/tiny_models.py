"""Tiny random models, at least one of each family, as transformers saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCAB = 101
"""A prime number, so that every tensor-parallel degree pads the vocabulary."""

_BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
}
_MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_QWEN3_MOE = {**_BASE, **_MOE, "head_dim": 8, "norm_topk_prob": True}

# The original context is shorter than the tests' sequences, so that all three ranges of the scaling are in use.
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

_LATENT = {
    **_BASE,
    "num_key_value_heads": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    # The original context is shorter than the sequences here too.
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "mscale": 0.8,
        "mscale_all_dim": 0.5,
        "beta_fast": 4.0,
        "original_max_position_embeddings": 32,
    },
}

_INDEXER = {"q_lora_rank": 20, "index_n_heads": 2, "index_head_dim": 6, "index_topk": 48}

_DELTA_NET = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 6,
    "rms_norm_eps": 1e-2,
}
_VISION = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": 32}
_VISION |= {"num_position_embeddings": 4, "patch_size": 2}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**_BASE, "rope_parameters": _LLAMA3_ROPE}),
    "qwen2": ("Qwen2Config", {**_BASE, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {**_BASE, "head_dim": 12}),
    "qwen3_moe": ("Qwen3MoeConfig", _QWEN3_MOE),
    "qwen3_moe_mixed": ("Qwen3MoeConfig", {**_QWEN3_MOE, "mlp_only_layers": [0, 2], "tie_word_embeddings": True}),
    "qwen3_moe_sparse_step": ("Qwen3MoeConfig", {**_QWEN3_MOE, "decoder_sparse_step": 2, "norm_topk_prob": False}),
    "mistral": ("MistralConfig", {**_BASE, "head_dim": 12, "sliding_window": 7}),
    "mixtral": (
        "MixtralConfig",
        {**_BASE, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "minimax_m2": (
        "MiniMaxM2Config",
        {**_BASE, "num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 8, "rotary_dim": 4},
    ),
    "gpt_oss": (
        "GptOssConfig",
        # A window shorter than the sequences, and gates and ups beyond their limit.
        {
            **_BASE,
            "intermediate_size": 24,
            "head_dim": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 5,
            "swiglu_limit": 0.7,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "beta_fast": 4.0,
                "truncate": False,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "gemma3_text": (
        "Gemma3TextConfig",
        {
            **_BASE,
            "tie_word_embeddings": True,
            "head_dim": 12,
            "query_pre_attn_scalar": 10,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {**_BASE, **_MOE, "num_experts_per_tok": 3, "shared_expert_intermediate_size": 24, "norm_topk_prob": False},
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        # A key head serves two value heads; gated delta nets and attention layers both come with and without experts.
        {
            **_QWEN3_MOE,
            **_DELTA_NET,
            "mlp_only_layers": [2],
            "shared_expert_intermediate_size": 24,
        },
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoeConfig",
        {
            "text_config": {**_BASE, **_MOE, "head_dim": 8, "moe_intermediate_size": 24, "mlp_only_layers": [2]},
            "vision_config": {**_VISION, "deepstack_visual_indexes": [0]},
        },
    ),
    "qwen3_5": ("Qwen3_5Config", {"text_config": {**_BASE, **_DELTA_NET}, "vision_config": _VISION}),
    "qwen3_5_moe": (
        "Qwen3_5MoeConfig",
        {
            "text_config": {
                **{key: value for key, value in _BASE.items() if key != "intermediate_size"},
                **_MOE,
                **_DELTA_NET,
                "shared_expert_intermediate_size": 24,
                "tie_word_embeddings": True,
            },
            "vision_config": _VISION,
            "tie_word_embeddings": True,
        },
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            **_BASE,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "head_dim": 8,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 1,
            "use_qk_norm": True,
            "attention_bias": True,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "num_mtp_layers": 0,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **_LATENT,
            "q_lora_rank": 20,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "num_mtp_layers": 0,
        },
    ),
    "deepseek_v32": (
        "DeepseekV32Config",
        # An indexer chooses all tokens of sequences that are no longer than this.
        {
            **_LATENT,
            **_INDEXER,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "glm_moe_dsa": (
        "GlmMoeDsaConfig",
        {
            **_LATENT,
            **_INDEXER,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
            "indexer_types": ["full", "shared", "full", "shared"],
        },
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        # The norms of latents have an epsilon of their own. Values are as wide as keys, as in GLM-4.7-Flash. A token
        # goes to the group with the best expert, where Megatron-Core would take the one with the best two.
        {
            **_LATENT,
            "v_head_dim": 12,
            "q_lora_rank": None,
            "num_experts_per_tok": 2,
            "topk_method": "group_limited_greedy",
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 1.5,
            "rms_norm_eps": 1e-2,
        },
    ),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        # The last stage of a pipeline has no experts.
        {
            **{key: value for key, value in _LATENT.items() if key != "first_k_dense_replace"},
            "mlp_layer_types": ["sparse", "dense", "dense", "dense"],
            "q_lora_rank": 20,
            "num_experts_per_tok": 2,
        },
    ),
}
"""Configuration class and arguments of each model. All have 4 layers, 8 heads and 0 or 8 experts."""

DENSE = ("llama", "qwen2", "qwen3", "qwen3_5", "gemma3_text")
HYBRID = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
"""Models with gated delta nets."""
ZERO_CENTERED = (*HYBRID, "gemma3_text")
"""Models whose norms multiply by 1 + weight."""
ALIKE = ("mistral", "qwen3_vl_moe", "deepseek_v2", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa")
"""Models that differ little from another one, and are tried on fewer layouts."""
MOE = tuple(name for name in MODELS if name not in (*DENSE, *ALIKE))


def save_models(folder: Path) -> None:
    """Write every model to `folder / name`, in float32 and, under `name + "-bf16"`, in bfloat16."""
    import transformers

    for name, (config_class, arguments) in MODELS.items():
        config = getattr(transformers, config_class)(**arguments)
        sees = hasattr(config, "vision_config")
        auto = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
        model = auto.from_config(config, dtype=torch.float32)
        generator = torch.Generator().manual_seed(len(name))
        for key, parameter in model.named_parameters():
            _randomize(key, parameter.data, generator, is_zero_centered=name in ZERO_CENTERED)
        offsets = {key: value for key, value in model.named_buffers() if key.endswith("e_score_correction_bias")}
        for offset_E in offsets.values():
            offset_E.normal_(std=0.2, generator=generator)
        model.save_pretrained(folder / name)
        model.to(torch.bfloat16)
        for key, offset_E in offsets.items():
            model.get_buffer(key).data = offset_E  # float32, as in files of every dtype
        model.save_pretrained(folder / f"{name}-bf16")


def _randomize(name: str, tensor: torch.Tensor, generator: torch.Generator, *, is_zero_centered: bool) -> None:
    """Draw every tensor, norms and biases too, away from its usual first values, at a scale that separates logits.

    Gated delta nets scale queries and keys to one length: where these are short, gradients are large, and so is the
    rounding error in them.
    """
    if name.endswith("A_log"):
        # Decays of a few tokens up to some tens of them.
        tensor.uniform_(-3.0, 1.5, generator=generator)
    elif name.endswith("conv1d.weight"):
        tensor.normal_(std=0.6, generator=generator)
    elif is_zero_centered and name.endswith("norm.weight") and "linear_attn" not in name:
        tensor.uniform_(-0.5, 0.5, generator=generator)
    elif tensor.ndim == 1 and not name.endswith("bias"):
        tensor.uniform_(0.5, 1.5, generator=generator)
    else:
        tensor.normal_(std=0.12 if is_zero_centered else 0.2, generator=generator)
