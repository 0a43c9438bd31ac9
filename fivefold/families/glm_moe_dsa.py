"""GLM-5: the layers of DeepSeek-V3.2, which may attend to what an earlier layer's indexer has chosen.

Models are trained on sequences that are short enough for indexers to choose every token. Indexers, and the layers for
multi-token prediction that files hold behind the last layer, are written unchanged.
"""

from __future__ import annotations

from fivefold.families import sigmoid_experts, sparse_attention
from fivefold.families.family import Family
from fivefold.families.hf_config import HFConfig
from fivefold.families.shape import ModelShape

_LETTERS = {"F": "full", "S": "shared"}


def _read(config: HFConfig) -> ModelShape:
    return sparse_attention.read_sparse_model(config, _indexed(config))


def _indexed(config: HFConfig) -> list[bool]:
    """Return which layers have an indexer: as `indexer_types` or `index_topk_pattern` list them, or every so many."""
    n_layers, pattern = config.integer("num_hidden_layers"), config.get("index_topk_pattern")
    kinds = config.items("indexer_types", str)
    if not kinds and isinstance(pattern, str):
        kinds = [_LETTERS.get(letter, letter) for letter in pattern]
    elif not kinds:
        kinds = config.items("index_topk_pattern", str)
    if not kinds:
        every, offset = config.integer("index_topk_freq", 0), config.integer("index_skip_topk_offset", 0)
        return [max(layer - offset + 1, 0) % max(every, 1) == 0 for layer in range(n_layers)]
    if len(kinds) != n_layers or set(kinds) - set(_LETTERS.values()) or kinds[0] != "full":
        raise config.error(
            f"the indexers of the {n_layers} layers are {', '.join(kinds)}; they must be one `full` or `shared` a "
            "layer, and the first layer's full"
        )
    return [kind == "full" for kind in kinds]


GLM_MOE_DSA = Family(
    "glm_moe_dsa",
    read=_read,
    defaults={
        **sigmoid_experts.DEFAULTS,
        "rope_interleave": True,
        "first_k_dense_replace": 3,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 2.5,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 2048,
        "index_topk_freq": 1,
        "index_skip_topk_offset": 2,
        "index_topk_pattern": None,
    },
    moe=sigmoid_experts.NAMES,
    kept=sparse_attention.KEPT,
    predicts_further=True,
    computed_as=sparse_attention.COMPUTED_AS,
)
