"""Tiny random models of every family, as transformers saves them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def hf_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a folder for each family, which transformers has saved, with tensors that all differ."""
    import transformers as hf

    base = {"vocab_size": 41, "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 32}
    base |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 4, "num_hidden_layers": 3}
    moe = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    qwen2 = {**base, "num_attention_heads": 8, "num_key_value_heads": 8}
    latent = base | {"num_key_value_heads": 16, "n_routed_experts": 8, "num_experts_per_tok": 2}
    latent |= {"moe_intermediate_size": 8, "n_shared_experts": 2, "first_k_dense_replace": 1}
    latent |= {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 6}
    indexer = {"q_lora_rank": 12, "index_n_heads": 2, "index_head_dim": 4, "index_topk": 16}
    delta = {
        "head_dim": 8,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 2,
        "linear_value_head_dim": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    }
    qwen3_5 = {key: value for key, value in {**base, **delta}.items() if key != "intermediate_size"}
    dense, experts = {"intermediate_size": 24}, {**moe, "shared_expert_intermediate_size": 24}
    vision = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": 16}
    vision |= {"num_position_embeddings": 4, "patch_size": 2}
    configs = {
        "qwen3_vl": hf.Qwen3VLConfig(
            text_config=base, vision_config={**vision, "deepstack_visual_indexes": [0]}, tie_word_embeddings=True
        ),
        "qwen3_vl_moe": hf.Qwen3VLMoeConfig(
            text_config={**base, **moe, "mlp_only_layers": [1], "moe_intermediate_size": 24},
            vision_config={**vision, "deepstack_visual_indexes": [0]},
        ),
        "qwen2_5_vl": hf.Qwen2_5_VLConfig(
            text_config={key: value for key, value in qwen2.items() if key != "head_dim"},
            vision_config={key: value for key, value in vision.items() if key != "num_position_embeddings"},
        ),
        "qwen3_5": hf.Qwen3_5Config(text_config={**qwen3_5, **dense}, vision_config=vision),
        "qwen3_5_moe": hf.Qwen3_5MoeConfig(text_config={**qwen3_5, **experts}, vision_config=vision),
        "llama": hf.LlamaConfig(**base, tie_word_embeddings=True),
        "mistral": hf.MistralConfig(**base, tie_word_embeddings=False, sliding_window=None),
        "qwen2": hf.Qwen2Config(**qwen2, tie_word_embeddings=True),
        "qwen3": hf.Qwen3Config(**base, tie_word_embeddings=False),
        "qwen3_moe": hf.Qwen3MoeConfig(**base, **moe, mlp_only_layers=[1]),
        "qwen2_moe": hf.Qwen2MoeConfig(**qwen2, **moe, shared_expert_intermediate_size=24),
        "qwen3_next": hf.Qwen3NextConfig(
            **{**base, **delta},
            **experts,
        ),
        "mixtral": hf.MixtralConfig(**base, num_local_experts=8, num_experts_per_tok=2, sliding_window=None),
        "minimax_m2": hf.MiniMaxM2Config(
            **base, num_local_experts=8, num_experts_per_tok=2, rope_parameters={"partial_rotary_factor": 0.5}
        ),
        "gpt_oss": hf.GptOssConfig(**base, num_local_experts=8, num_experts_per_tok=2),
        "gemma3_text": hf.Gemma3TextConfig(**base),
        "glm4_moe": hf.Glm4MoeConfig(
            **base,
            n_routed_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=8,
            attention_bias=True,
            num_mtp_layers=0,
        ),
        "deepseek_v3": hf.DeepseekV3Config(**latent, q_lora_rank=12, n_group=4, topk_group=1, num_mtp_layers=0),
        "deepseek_v2": hf.DeepseekV2Config(**latent, q_lora_rank=None),
        "glm4_moe_lite": hf.Glm4MoeLiteConfig(**latent, q_lora_rank=12),
        "deepseek_v32": hf.DeepseekV32Config(**latent, **indexer, n_group=4, topk_group=1),
        "glm_moe_dsa": hf.GlmMoeDsaConfig(**latent, **indexer, indexer_types=["full", "shared", "full"]),
    }
    folders = {}
    for name, config in configs.items():
        auto = hf.AutoModelForImageTextToText if hasattr(config, "vision_config") else hf.AutoModelForCausalLM
        model = auto.from_config(config, dtype=torch.float32)
        generator = torch.Generator().manual_seed(len(folders))
        for parameter in model.parameters():
            parameter.data.normal_(generator=generator)
        for name_in_memory, buffer in model.named_buffers():
            if name_in_memory.endswith("e_score_correction_bias"):
                buffer.normal_(generator=generator)
        folders[name] = tmp_path_factory.mktemp("hf") / name
        model.save_pretrained(folders[name])
    return folders
