"""Qwen3 with experts (Qwen3-30B-A3B and Qwen3-235B-A22B)."""

from __future__ import annotations

from fivefold.families.decoder import add_experts, read_dense, sparse_layers, uses_window
from fivefold.families.family import Family, GGUFArchitecture, MoENames
from fivefold.families.hf_config import HFConfig
from fivefold.families.shape import ModelShape


def _read(config: HFConfig) -> ModelShape:
    return add_experts(
        read_dense(config, has_window=uses_window(config), qk_norm=True),
        config,
        moe_layers=sparse_layers(config),
        width_key="moe_intermediate_size",
        norm_topk_prob=config.flag("norm_topk_prob"),
    )


QWEN3_MOE = Family(
    "qwen3_moe",
    read=_read,
    defaults={"sliding_window": 4096},
    moe=MoENames(),
    gguf=GGUFArchitecture(
        "qwen3moe",
        "Qwen3MoeForCausalLM",
        sizes={
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        constants={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
)
