"""DeepSeek-V3.2: DeepSeek-V3, whose attention is to the tokens that an indexer chooses.

Models are trained on sequences that are short enough for indexers to choose every token. Indexers, and the layers for
multi-token prediction that files hold behind the last layer, are written unchanged.
"""

from __future__ import annotations

from fivefold.families import sigmoid_experts, sparse_attention
from fivefold.families.family import Family
from fivefold.families.hf_config import HFConfig
from fivefold.families.shape import ModelShape


def _read(config: HFConfig) -> ModelShape:
    return sparse_attention.read_sparse_model(config, [True] * config.integer("num_hidden_layers"))


DEEPSEEK_V32 = Family(
    "deepseek_v32",
    read=_read,
    defaults={
        **sigmoid_experts.DEFAULTS,
        "rope_interleave": True,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 2048,
    },
    moe=sigmoid_experts.NAMES,
    kept=sparse_attention.KEPT,
    predicts_further=True,
    computed_as=sparse_attention.COMPUTED_AS,
)
