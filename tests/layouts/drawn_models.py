"""Models and layouts that are drawn: sizes, options and layouts together as nobody has chosen them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hf_reference import load_model
from tiny_models import VOCAB, ZERO_CENTERED, _randomize

from fivefold.config.schema.rollout import GenerationConfig
from fivefold.rollout.contract import complete
from fivefold.rollout.protocol import SamplingParams, group_requests
from fivefold.rollout.transformers_engine import TransformersEngine
from tests.unit.rollout.conftest import byte_tokenizer

Config = dict[str, Any]


@dataclass(frozen=True)
class Drawn:
    """A model and a layout for it."""

    family: str
    config_class: str
    config: Config
    layout: str


def _base(draw: random.Random) -> Config:
    hidden = draw.choice((16, 24, 40))
    return {
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": draw.choice((16, 20, 36)),
        "num_hidden_layers": draw.choice((2, 3, 4)),
        "num_attention_heads": 8,
        "num_key_value_heads": draw.choice((2, 4, 8)),
        "head_dim": draw.choice((6, 8, 10)),
        "max_position_embeddings": 128,
        "tie_word_embeddings": draw.random() < 0.5,
        "attention_dropout": 0.0,
        "rms_norm_eps": draw.choice((1e-6, 1e-3)),
        "rope_parameters": {"rope_type": "default", "rope_theta": draw.choice((20.0, 1e4))},
    }


def _experts(draw: random.Random) -> Config:
    return {
        "num_experts": draw.choice((4, 8)),
        "num_experts_per_tok": draw.choice((2, 3)),
        "moe_intermediate_size": draw.choice((8, 12)),
    }


def _kinds(draw: random.Random, base: Config, *names: str) -> list[str]:
    """Return a kind for each layer, every kind at least once where there are layers enough."""
    n = int(base["num_hidden_layers"])
    kinds = [*names, *(draw.choice(names) for _ in range(n))][:n]
    draw.shuffle(kinds)
    return kinds


def _mistral(draw: random.Random) -> Config:
    return {**_base(draw), "sliding_window": draw.choice((None, 2, 6, 200))}


def _qwen3_moe(draw: random.Random) -> Config:
    base = _base(draw)
    dense = [layer for layer in range(base["num_hidden_layers"]) if draw.random() < 0.3]
    normalises, experts = draw.random() < 0.5, _experts(draw)
    if not normalises:
        experts["num_experts_per_tok"] = draw.choice((1, 2))
    return {**base, **experts, "norm_topk_prob": normalises, "mlp_only_layers": dense[:-1]}


def _minimax_m2(draw: random.Random) -> Config:
    base, experts = _base(draw), _experts(draw)
    rotary = draw.choice((2, 4, base["head_dim"]))
    experts["num_local_experts"] = experts.pop("num_experts")
    del experts["moe_intermediate_size"], base["rope_parameters"]
    return {**base, **experts, "rotary_dim": rotary, "rope_theta": draw.choice((20.0, 1e4))}


def _gpt_oss(draw: random.Random) -> Config:
    base, experts = _base(draw), _experts(draw)
    experts["num_local_experts"] = experts.pop("num_experts")
    del experts["moe_intermediate_size"]
    yarn = {"rope_type": "yarn", "rope_theta": 500.0, "factor": draw.choice((2.0, 8.0)), "beta_fast": 4.0}
    yarn |= {"truncate": draw.random() < 0.5, "original_max_position_embeddings": 32}
    return {
        **base,
        **experts,
        "sliding_window": draw.choice((2, 5, 40)),
        "layer_types": _kinds(draw, base, "sliding_attention", "full_attention"),
        "swiglu_limit": draw.choice((0.3, 7.0)),
        **({"rope_parameters": yarn} if draw.random() < 0.7 else {}),
    }


def _gemma3(draw: random.Random) -> Config:
    base = _base(draw)
    far = draw.choice(({"rope_type": "default"}, {"rope_type": "linear", "factor": 4.0}))
    return {
        **base,
        "tie_word_embeddings": True,
        "pad_token_id": None,  # whose embedding would learn nothing in transformers
        "query_pre_attn_scalar": draw.choice((5, 24)),
        "sliding_window": draw.choice((2, 5, 40)),
        "layer_types": _kinds(draw, base, "sliding_attention", "full_attention"),
        "rope_parameters": {
            "full_attention": {**far, "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    }


def _hybrid(draw: random.Random) -> Config:
    base = _base(draw)
    keys = draw.choice((2, 4))
    sizes = {
        "head_dim": draw.choice((8, 16)),
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * draw.choice((1, 2)),
        "linear_key_head_dim": draw.choice((8, 16)),
        "linear_value_head_dim": draw.choice((4, 6)),
        "linear_conv_kernel_dim": draw.choice((2, 4)),
        "layer_types": _kinds(draw, base, "linear_attention", "full_attention"),
        "rms_norm_eps": 1e-2,
    }
    rope = {**base["rope_parameters"], "partial_rotary_factor": draw.choice((0.25, 0.5))}
    return {**base, **sizes, "rope_parameters": rope}


def _qwen3_next(draw: random.Random) -> Config:
    shared = {"shared_expert_intermediate_size": draw.choice((8, 16))}
    return {**_hybrid(draw), **_experts(draw), **shared, "norm_topk_prob": draw.random() < 0.5}


def _latent(draw: random.Random) -> Config:
    base = _base(draw)
    del base["head_dim"]
    base |= {"num_key_value_heads": 8, "first_k_dense_replace": draw.choice((0, 1))}
    base |= {"kv_lora_rank": draw.choice((6, 12)), "qk_nope_head_dim": draw.choice((4, 8)), "qk_rope_head_dim": 4}
    base |= {"v_head_dim": draw.choice((4, 6, 8)), "n_shared_experts": draw.choice((1, 2)), "q_lora_rank": 10}
    base |= {"n_routed_experts": 8, "num_experts_per_tok": draw.choice((2, 3)), "moe_intermediate_size": 12}
    groups, scale = draw.choice((1, 2, 4)), draw.choice((1.0, 2.5))
    chosen = draw.randint(2 if groups == 4 else 1, groups)
    return {**base, "n_group": groups, "topk_group": chosen, "routed_scaling_factor": scale}


def _deepseek_v32(draw: random.Random) -> Config:
    indexer = {"index_n_heads": draw.choice((1, 2)), "index_head_dim": 6, "index_topk": 48}
    return {**_latent(draw), **indexer}


def _glm_moe_dsa(draw: random.Random) -> Config:
    config = _deepseek_v32(draw)
    n = config["num_hidden_layers"]
    kinds = ["full", *(draw.choice(("full", "shared")) for _ in range(n - 1))]
    return {**config, "n_group": 1, "topk_group": 1, "indexer_types": kinds, "rms_norm_eps": 1e-2}


FAMILIES: dict[str, tuple[str, Callable[[random.Random], Config]]] = {
    "mistral": ("MistralConfig", _mistral),
    "qwen3_moe": ("Qwen3MoeConfig", _qwen3_moe),
    "minimax_m2": ("MiniMaxM2Config", _minimax_m2),
    "gpt_oss": ("GptOssConfig", _gpt_oss),
    "gemma3_text": ("Gemma3TextConfig", _gemma3),
    "qwen3_next": ("Qwen3NextConfig", _qwen3_next),
    "deepseek_v3": ("DeepseekV3Config", lambda draw: {**_latent(draw), "num_mtp_layers": 0}),
    "deepseek_v32": ("DeepseekV32Config", _deepseek_v32),
    "glm_moe_dsa": ("GlmMoeDsaConfig", _glm_moe_dsa),
}
"""Configuration class, and what draws its arguments, of each family whose layers differ from Llama's."""


def drawn(family: str, seed: int) -> Drawn:
    """Return a model of a family, and a layout of at most four processes."""
    draw = random.Random(f"{family} {seed}")
    config_class, make = FAMILIES[family]
    config = make(draw)
    n_experts = config.get("num_experts", config.get("num_local_experts", config.get("n_routed_experts", 0)))
    stages = draw.choice([n for n in (1, 2) if config["num_hidden_layers"] % n == 0])
    tp, cp = draw.choice((1, 2)), draw.choice((1, 2))
    if stages * tp * cp > 4:
        cp = 1
    p = f"p{stages}" if stages > 1 else ""
    attention = f"{p}{f't{tp}' if tp > 1 else ''}{f'c{cp}' if cp > 1 else ''}"
    if n_experts and tp * cp > 1:
        within = draw.choice(("e", "t"))
        layout = f"megatron:(attn:{attention}|ffn:{p}{within}{tp * cp})"
    else:
        layout = f"megatron:{attention or 'd1'}"
    if draw.random() < 0.25:
        layout = draw.choice(("fsdp:d2", "fsdp:c2", "fsdp:t2"))
    return Drawn(family, config_class, config, layout)


def save_drawn(model: Drawn, folder: Path) -> None:
    """In a worker: write a drawn model with random weights, in float32."""
    import transformers

    config = getattr(transformers, model.config_class)(**model.config)
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(len(model.layout))
    for key, parameter in made.named_parameters():
        _randomize(key, parameter.data, generator, is_zero_centered=model.family in ZERO_CENTERED)
    for key, buffer in made.named_buffers():
        if key.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.2, generator=generator)
    made.save_pretrained(folder)


def generation_gap(folder: Path, seed: int) -> float:
    """In a worker: return the largest difference between log-probs of the embedded engine's completions and Hugging
    Face's of the same tokens."""
    byte_tokenizer().save_pretrained(folder)
    engine = TransformersEngine.from_path(
        str(folder), dtype="float32", device="cpu", max_batch_size=3, tokenizer_path=None, load_weights=True
    )
    draw = random.Random(seed)
    prompts = [[draw.randrange(3, 60) for _ in range(draw.randint(1, 20))] for _ in range(6)]
    sampling = SamplingParams.from_config(GenerationConfig(max_new_tokens=24))
    completions = complete(engine, group_requests(prompts, 1, (seed,)), sampling)
    model, gaps = load_model(folder).eval(), []
    for prompt, completion in zip(prompts, completions, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *completion.token_ids.tolist()]])).logits[0, len(prompt) - 1 : -1]
        chosen = torch.from_numpy(completion.token_ids).long()[:, None]
        expected = logits.log_softmax(-1).gather(1, chosen).squeeze(1)
        gaps.append(float((expected - torch.from_numpy(completion.logprobs)).abs().max()))
    return max(gaps)
