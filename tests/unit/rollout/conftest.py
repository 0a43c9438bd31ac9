"""Tiny random models of each family, saved as Hugging Face folders, and replicas over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV32Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmMoeDsaConfig,
    GptOssConfig,
    LlamaConfig,
    MiniMaxM2Config,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

from fivefold.rollout.replica import ReplicaSpec
from tests.unit.rollout.fake_server import write_python
from tests.unit.rollout.served import Served, start

VOCABULARY = 67
BATCH_SIZE = 6
END = 2

ATTENTION = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "initializer_range": 0.4,
    "eos_token_id": END,
    "bos_token_id": 1,
    **ATTENTION,
}
VISION = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": 32, "patch_size": 2}
SIGHT = {"image_token_id": 66, "video_token_id": 65, "vision_start_token_id": 64, "vision_end_token_id": 63}
DELTA_NET = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LATENT = {
    **COMMON,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
INDEXER = {"q_lora_rank": 12, "index_n_heads": 2, "index_head_dim": 6, "index_topk": 64}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "mscale_all_dim": 1.0, "mscale": 1.0}
YARN |= {"original_max_position_embeddings": 16}
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**COMMON, rope_parameters=LLAMA3_ROPE),
    "qwen2": lambda: Qwen2Config(**COMMON, tie_word_embeddings=True),
    "qwen3_next": lambda: Qwen3NextConfig(
        # With larger weights transformers' own step by step decoding is 1e-3 away from its forward pass.
        **{**COMMON, **DELTA_NET, "initializer_range": 0.2},
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=16,
    ),
    "qwen3_5": lambda: Qwen3_5Config(
        text_config={**COMMON, **DELTA_NET, "initializer_range": 0.2, "head_dim": 16}, vision_config=VISION, **SIGHT
    ),
    "qwen3_vl": lambda: Qwen3VLConfig(
        text_config={**COMMON, "head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
        vision_config={**VISION, "depth": 3, "initializer_range": 0.4, "deepstack_visual_indexes": [0, 2]},
        tie_word_embeddings=True,
        **SIGHT,
    ),
    "qwen3_vl_moe": lambda: Qwen3VLMoeConfig(
        text_config={
            **COMMON,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "mlp_only_layers": [0],
        },
        vision_config={**VISION, "depth": 3, "initializer_range": 0.4, "deepstack_visual_indexes": [0, 2]},
        **SIGHT,
    ),
    "qwen2_5_vl": lambda: Qwen2_5_VLConfig(
        text_config={
            **COMMON,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 1]},
        },
        vision_config={**VISION, "depth": 3, "initializer_range": 0.4, "window_size": 8, "fullatt_block_indexes": [1]},
        **SIGHT,
    ),
    "qwen3_5_moe": lambda: Qwen3_5MoeConfig(
        text_config={
            **{key: value for key, value in COMMON.items() if key != "intermediate_size"},
            **DELTA_NET,
            "initializer_range": 0.2,
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 16,
        },
        vision_config=VISION,
        **SIGHT,
    ),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **COMMON,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        mlp_only_layers=[0],
    ),
    # In no dtype are the rows of these experts multiples of 16 bytes, ...
    "narrow_experts": lambda: Qwen3MoeConfig(
        **COMMON, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=6
    ),
    # ... and in bfloat16 the rows of these are not.
    "odd_hidden": lambda: Qwen3MoeConfig(
        **{**COMMON, "hidden_size": 36}, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
    ),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **COMMON,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
    ),
    "mistral": lambda: MistralConfig(**COMMON, head_dim=12, sliding_window=4),
    "gemma3_text": lambda: Gemma3TextConfig(
        # Embeddings are scaled, and norms keep the size of what they add.
        **{**COMMON, "initializer_range": 0.2, "num_hidden_layers": 3},
        head_dim=12,
        query_pre_attn_scalar=10,
        sliding_window=3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "narrow_joint_experts": lambda: GptOssConfig(
        **{**COMMON, "intermediate_size": 10, "initializer_range": 0.2},
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "gpt_oss": lambda: GptOssConfig(
        **COMMON,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=3,
        swiglu_limit=0.7,
        rope_parameters={**YARN, "truncate": False},
    ),
    "minimax_m2": lambda: MiniMaxM2Config(
        **COMMON, head_dim=8, rotary_dim=4, num_local_experts=4, num_experts_per_tok=2
    ),
    "mixtral": lambda: MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2),
    "glm4_moe": lambda: Glm4MoeConfig(
        **COMMON,
        head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        use_qk_norm=True,
        num_mtp_layers=0,
    ),
    "deepseek_v3": lambda: DeepseekV3Config(
        **LATENT, q_lora_rank=12, n_group=2, topk_group=1, rope_parameters=YARN, num_mtp_layers=0
    ),
    "deepseek_v2": lambda: DeepseekV2Config(**LATENT, q_lora_rank=None),
    "glm4_moe_lite": lambda: Glm4MoeLiteConfig(**LATENT, q_lora_rank=12),
    "deepseek_v32": lambda: DeepseekV32Config(**LATENT, **INDEXER, n_group=2, topk_group=1, rope_parameters=YARN),
    "glm_moe_dsa": lambda: GlmMoeDsaConfig(
        **{**LATENT, "num_hidden_layers": 3}, **INDEXER, indexer_types=["full", "shared", "full"]
    ),
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Token 3 + i is the i-th of the characters space, a-z, A-Z, digits; 0 to 2 are special."""
    characters = ["Ġ", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"]
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *characters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """(family, seed) -> folder of a random float32 model with a tokenizer; made once."""
    made: dict[tuple[str, int], Path] = {}

    def folder(family: str, seed: int = 0) -> Path:
        if (family, seed) not in made:
            path = tmp_path_factory.mktemp(f"{family}-{seed}")
            torch.manual_seed(seed)
            config = CONFIGS[family]()
            sees = hasattr(config, "vision_config")
            model = (AutoModelForImageTextToText if sees else AutoModelForCausalLM).from_config(
                config, dtype=torch.float32
            )
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1 or name.endswith("_bias"):  # they begin as ones and zeros, which hide a mix-up
                    parameter.data += 0.3 * torch.randn_like(parameter)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.normal_(std=0.2)
            model.save_pretrained(path)
            byte_tokenizer().save_pretrained(path)
            made[family, seed] = path
        return made[family, seed]

    return folder


def spec_of(backend: str, model: Path, **changes: Any) -> ReplicaSpec:
    """Return a replica of `backend` over the model in a folder; `changes` are fields that differ."""
    values: dict[str, Any] = {
        "backend": backend,
        "path": str(model),
        "tokenizer_path": str(model),
        "dtype": "bfloat16",
        "max_batch_size": BATCH_SIZE,
        "load_weights": False,
        "run": uuid4().hex[:8],
        "tp": 1,
        "pp": 1,
        "max_length": 60,
        "seed": 5,
        "can_sleep": True,
        "reserved": 0,
        "memory_fraction": 0.4,
        "python": None,
        "arguments": (),
    }
    return ReplicaSpec(**{**values, **changes})


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def server(
    request: pytest.FixtureRequest, model_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """One server of each kind for all tests of a file. Every test leaves it awake."""
    folder, model = tmp_path_factory.mktemp(request.param), model_folder("qwen3_moe")
    spec = spec_of(request.param, model, python=write_python(folder))
    engine = start(spec)
    yield Served(spec, engine, folder, load_file(model / "model.safetensors"))
    engine.close()
