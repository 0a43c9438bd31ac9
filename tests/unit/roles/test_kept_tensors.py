"""A model whose weights come from elsewhere has in its folder what is written again unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV32Config

from fivefold.config.load import load_recipe
from fivefold.config.roles import roles_of
from fivefold.config.schema.train import TrainRecipe
from fivefold.roles.checks import check_weight_files

RECIPE = Path(__file__).resolve().parents[3] / "recipes" / "quickstart.yaml"


def test_random_weights_need_the_indexers_of_the_folder(tmp_path: Path) -> None:
    config = DeepseekV32Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, n_routed_experts=4,
        num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=2, num_experts_per_tok=2, n_group=1,
        topk_group=1, first_k_dense_replace=1, kv_lora_rank=12, q_lora_rank=20, qk_nope_head_dim=8,
        qk_rope_head_dim=4, v_head_dim=6, index_n_heads=2, index_head_dim=6, index_topk=16,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    recipe = load_recipe(RECIPE, [f"actor.path={tmp_path}", "actor.init_from_scratch=true"], TrainRecipe)
    actor = [roles_of(recipe)["actor"]]
    with pytest.raises(ValueError, match=r"lacks model\.layers\.0\.self_attn\.indexer\.wq_b\.weight .* 9 more tensors"):
        check_weight_files(recipe, actor)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    check_weight_files(recipe, actor)


def test_servers_that_draft_tokens_need_further_layers_in_the_folder() -> None:
    keys = ["rollout.backend=vllm:d1", "cluster.n_gpus_per_node=1", "actor.backend=megatron:d1", "actor.dtype=bfloat16"]

    def check(*overrides: str) -> None:
        recipe = load_recipe(RECIPE, [*keys, *overrides], TrainRecipe)
        check_weight_files(recipe, [roles_of(recipe)["actor"]])

    check()
    check("rollout.speculative.method=ngram")
    with pytest.raises(ValueError, match=r"tiny-moe has no weights for multi-token prediction .* drop rollout\.specul"):
        check("rollout.speculative.method=mtp")
