"""Weights that cannot be frozen are refused before a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.config.load import load_recipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.families.read import find_shape
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
