"""Adapters that an engine or a model cannot have are refused before a run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from fivefold.config.load import load_recipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.families.read import find_shape
from fivefold.rules.recipe import recipe_problems
from fivefold.rules.served_adapters import served_problems

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["actor.lora.targets=[q_proj, qproj]"], "no layer is named 'qproj': the model has down_proj, gate_proj"),
        (["actor.lora.rank=4", "actor.megatron.bridge_type=mbridge"], "needs Fivefold's own bridge"),
        (
            ["actor.lora.rank=4", "actor.megatron.kernels=te", "actor.dtype=bfloat16"],
            "needs actor.megatron.kernels=fivefold, and it is te",
        ),
        (["actor.lora.rank=4", "actor.kl_ctl=0.1", "ref.refresh_every=2"], "ref.refresh_every and ref.ema_decay let"),
        (["actor.lora.path=/no/such"], "'/no/such' is no folder of adapters: it has no adapter_config.json"),
    ],
)
def test_adapters_that_cannot_be_are_refused(keys: list[str], message: str) -> None:
    recipe = load_recipe(ROOT / "recipes/quickstart.yaml", keys, TrainRecipe)
    problems = list(recipe_problems(recipe, find_shape("package:tiny-moe"), {}))
    assert any(message in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("model", "keys", "message"),
    [
        ("Qwen3-30B-A3B", ["rollout.backend=sglang:d1", "actor.lora.rank=300"], None),
        ("Qwen3-30B-A3B", ["rollout.backend=vllm:d1", "actor.lora.rank=512"], None),
        (
            "Qwen3-30B-A3B",
            ["rollout.backend=vllm:d1", "actor.lora.rank=513"],
            "vLLM serves adapters of ranks up to 512",
        ),
        ("Qwen3-30B-A3B", ["rollout.backend=vllm:d1", "actor.lora.rank_of_experts=600"], "and the actor's have 600"),
        ("DeepSeek-V3", ["rollout.backend=vllm:d1", "actor.lora.rank=8"], "vLLM folds kv_b_proj of deepseek_v3 into"),
        ("DeepSeek-V3", ["rollout.backend=vllm:d1", "actor.lora.targets=[o_proj]"], None),
        ("DeepSeek-V3", ["rollout.backend=sglang:d1", "actor.lora.targets=[o_proj]"], "SGLang does not serve all"),
        ("Qwen3-30B-A3B", ["rollout.backend=transformers:d1", "actor.lora.rank=8"], None),
    ],
)
def test_adapters_that_a_server_cannot_have_next_to_its_weights_are_refused(
    model: str, keys: list[str], message: str | None
) -> None:
    keys = ["rollout.weight_transport=served_adapter", *keys]
    recipe = load_recipe(ROOT / "recipes/quickstart.yaml", keys, TrainRecipe)
    problems = list(served_problems(recipe, find_shape(model)))
    if message is None:
        assert not problems
    else:
        [problem] = problems
        assert message in problem


def test_a_rank_for_experts_without_adapters_has_no_effect() -> None:
    keys = ["actor.lora.experts=none", "actor.lora.rank_of_experts=2"]
    with pytest.raises(ValueError, match="rank_of_experts=2 has no effect"):
        load_recipe(ROOT / "recipes/quickstart.yaml", keys, TrainRecipe)


def test_the_recipes_of_the_page_are_taken() -> None:
    page = (ROOT / "docs" / "lora.md").read_text(encoding="utf-8")
    adapters, frozen = (yaml.safe_load(block)["actor"] for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL))
    for keys in (
        [f"actor.lora.rank={adapters['lora']['rank']}", f"actor.optimizer.lr={adapters['optimizer']['lr']}"],
        [f"actor.freeze={json.dumps(frozen['freeze'])}", "actor.path=Qwen3-30B-A3B"],
    ):
        recipe = load_recipe(ROOT / "recipes/quickstart.yaml", keys, TrainRecipe)
        assert (recipe.actor.lora is None) == bool(recipe.actor.freeze)
        assert not list(recipe_problems(recipe, find_shape(recipe.actor.path), {}))
