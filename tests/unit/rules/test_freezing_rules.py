"""Weights that cannot be frozen are refused before a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fivefold.bridge.decoder import mappings as of_megatron
from fivefold.bridge.parameters import trained_parameters
from fivefold.config.load import load_recipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.families.read import find_shape
from fivefold.families.tensors import Trained, tensors
from fivefold.fsdp.mappings import mappings as of_fsdp
from fivefold.rules.freezing import frozen_problems
from fivefold.rules.recipe import recipe_problems

ROOT = Path(__file__).resolve().parents[3]
ATTENTION = '"*.self_attn.{}_proj.weight"'
CRITIC = ("critic.path=package:tiny-moe", "critic.backend=megatron:d2", "actor.advantage=gae")


def problems(*keys: str) -> list[str]:
    recipe = load_recipe(ROOT / "recipes/quickstart.yaml", keys, TrainRecipe)
    return list(recipe_problems(recipe, find_shape("package:tiny-moe"), {}))


@pytest.mark.parametrize(
    "keys",
    [
        ("actor.freeze=[]",),
        ('actor.freeze=["model.embed_tokens.weight", "*.experts.*", "*.norm.*"]',),
        (f"actor.freeze=[{', '.join(ATTENTION.format(letter) for letter in 'qkv')}]",),
        (f"actor.freeze=[{ATTENTION.format('k')}]", "actor.backend=fsdp:d1"),
        (*CRITIC, 'critic.freeze=["model.*"]'),
    ],
)
def test_weights_are_frozen_by_name_and_pattern(keys: tuple[str, ...]) -> None:
    assert problems(*keys) == []


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (('actor.freeze=["*"]',), r"actor.freeze: * names all weights, and nothing is left to train"),
        (('actor.freeze=["model.*", "lm_head.*"]',), "names all weights, and nothing is left to train"),
        (
            ('actor.freeze=["model.embed_token.weight"]',),
            "no weight is named 'model.embed_token.weight'; names are as in the Hugging Face files; did you mean "
            "model.embed_tokens.weight?",
        ),
        (('actor.freeze=["decoder.*"]',), "no weight is named 'decoder.*'"),
        (
            (f"actor.freeze=[{ATTENTION.format('k')}]",),
            "model.layers.0.self_attn.k_proj.weight is frozen and model.layers.0.self_attn.q_proj.weight is trained, "
            "but on megatron they are parts of one parameter",
        ),
        (
            ('actor.freeze=["*.experts.3.*"]', "actor.backend=fsdp:d1"),
            "mlp.experts.3.gate_proj.weight is frozen and model.layers.0.mlp.experts.0.gate_proj.weight is trained, "
            "but on fsdp they are parts of one parameter",
        ),
        (('actor.freeze=["*.experts.*.up_proj.*"]', "actor.backend=fsdp:d1"), "freeze both or none"),
        ((*CRITIC, 'critic.freeze=["lm_head.weight"]'), "critic.freeze: no weight is named 'lm_head.weight'"),
    ],
)
def test_what_cannot_be_frozen_is_refused(keys: tuple[str, ...], message: str) -> None:
    found = problems(*keys)
    assert any(message in problem for problem in found), found


def test_adapters_freeze_all_weights_alone() -> None:
    with pytest.raises(ValueError, match="has no effect with lora, which freezes all weights"):
        problems("actor.lora.rank=4", 'actor.freeze=["lm_head.weight"]')


MODELS = (
    "Qwen2.5-0.5B", "Qwen3-30B-A3B", "Qwen1.5-MoE-A2.7B", "Mixtral-8x7B", "DeepSeek-V2-Lite", "GLM-4.5-Air",
    "Qwen3-Next-80B-A3B", "Qwen3.5-35B-A3B",
)  # fmt: skip


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
@pytest.mark.parametrize("name", MODELS)
def test_weights_are_refused_alone_exactly_where_the_engine_keeps_them_with_others(name: str, backend: str) -> None:
    shape = find_shape(name)
    few = {"n_experts": 4, "top_k": 2, "expert_groups": 1, "groups_per_token": 1} if shape.is_moe else {}
    shape = replace(shape, n_layers=4, moe_layers=shape.moe_layers[:4], delta_layers=shape.delta_layers[:4], **few)
    known = of_megatron(shape) if backend == "megatron" else of_fsdp(shape).values()
    for tensor in tensors(shape):
        for pattern in {tensor.names[0], tensor.name.format(expert="*")}:
            try:
                trained_parameters(known, Trained((pattern,)))
                is_alone = True
            except ValueError:
                is_alone = False
            assert (not list(frozen_problems((pattern,), shape, backend))) == is_alone, pattern
