"""What images do not reach is refused before a run."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from fivefold.config.problems import RecipeError
from fivefold.config.schema.preferences import DPORecipe
from fivefold.config.schema.sft import SFTRecipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.families.read import find_shape
from fivefold.rules.recipe import check_recipe
from fivefold.rules.vision import most_pixels

SEEING, TEXT = find_shape("package:tiny-vl"), find_shape("package:tiny-moe")
BASE: dict[str, Any] = {
    "experiment_name": "images",
    "total_train_steps": 1,
    "cluster": {"n_gpus_per_node": 4},
    "actor": {"path": "package:tiny-vl", "backend": "megatron:d1"},
    "rollout": {"backend": "transformers:d1"},
    "train_dataset": {"path": "package:squares/train", "image_key": "images", "answer_key": "answer"},
    "gconfig": {"max_new_tokens": 8},
    "reward": {"fn": "exact_match"},
}

GAME = {"game": "fivefold.environments.guess_digit:GuessDigit", "max_length": 64}


def recipe(**sections: Any) -> TrainRecipe:
    merged = {name: {**BASE.get(name, {}), **keys} for name, keys in sections.items()}
    return TrainRecipe.model_validate({**BASE, **merged})


def test_the_plain_recipe_is_accepted() -> None:
    check_recipe(recipe(), SEEING)
    check_recipe(recipe(actor={"backend": "fsdp:d2"}), SEEING)
    check_recipe(recipe(actor={"backend": "megatron:p3"}), SEEING)
    check_recipe(recipe(rollout={"backend": "vllm:d1t2"}), SEEING)
    check_recipe(recipe(rollout={"backend": "sglang:d1t2"}), SEEING)


@pytest.mark.parametrize(
    ("sections", "error"),
    [
        ({"rollout": {"backend": "sglang:p2"}}, "has not been tried with pipeline stages of sglang"),
        ({"rollout": {"backend": "vllm:p2"}}, "has not been tried with pipeline stages of vllm"),
        (
            {"rollout": {"backend": "vllm:d1", "speculative": {"method": "ngram"}}},
            "has not been tried with rollout.speculative",
        ),
        (
            {"rollout": {"backend": "vllm:d1", "quantization": "fp8_per_tensor"}},
            "has not been tried with rollout.quantization",
        ),
        (
            {"environment": {"agent": "agents.py:play"}, "reward": {"fn": "environment"}},
            "an agent writes its own prompts",
        ),
        (
            {
                "environment": {**GAME, "turn_template": "{observation}{history}", "memory": 2},
                "reward": {"fn": "environment"},
            },
            "an episode with images is one sequence, so drop environment.memory",
        ),
        (
            {"environment": {"tools": "tools.py:Tools"}, "reward": {"fn": "environment"}},
            "an episode with images is one sequence, so set environment.keep_thinking=true",
        ),
        ({"actor": {"megatron": {"kernels": "te"}}}, "has not been tried with actor.megatron.kernels=te"),
    ],
)
def test_parts_that_images_do_not_reach_are_refused(sections: dict[str, Any], error: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(error)):
        check_recipe(recipe(**sections), SEEING)


def test_images_are_bounded_by_the_largest_of_all_data_sets() -> None:
    rows = {"path": "package:squares/test", "image_key": "images", "answer_key": "answer"}
    texts = {"path": "package:arithmetic/test", "answer_key": "answer"}
    given = recipe(train_dataset={"max_pixels": 400}, valid_dataset={**rows, "max_pixels": 900})
    assert most_pixels(given) == 900
    assert most_pixels(recipe(train_dataset={"max_pixels": 400}, valid_dataset=texts)) == 400
    assert most_pixels(recipe(train_dataset={"max_pixels": 400}, valid_dataset=rows)) is None
    assert most_pixels(recipe()) is None


def test_models_that_read_text_alone_are_refused() -> None:
    with pytest.raises(RecipeError, match=re.escape("the actor's model (qwen3_moe) reads text alone")):
        check_recipe(recipe(actor={"path": "package:tiny-moe"}), TEXT)
    other = replace(SEEING, vision=None)
    with pytest.raises(RecipeError, match=r"ref.path=package:tiny-moe is a model that does not take images"):
        check_recipe(
            recipe(actor={"kl_ctl": 0.1}, ref={"path": "package:tiny-moe", "backend": "megatron:d1"}),
            SEEING,
            {"ref": other},
        )


@pytest.mark.parametrize("section", ["train_dataset", "valid_dataset"])
def test_given_answers_to_images_need_models_that_see_them(section: str) -> None:
    sections: dict[str, Any] = {"train_dataset": {"path": "a.parquet"}, "valid_dataset": {"path": "b.parquet"}}
    sections[section]["image_key"] = "images"
    actor = {"path": "package:tiny-vl", "backend": "megatron:d1"}
    common = {"experiment_name": "answers", "total_train_steps": 1, "cluster": {"n_gpus_per_node": 4}, **sections}
    fine_tuning = SFTRecipe.model_validate({**common, "actor": actor})
    check_recipe(fine_tuning, SEEING)
    with pytest.raises(RecipeError, match=rf"{section}\.image_key=images names images, and .* reads text alone"):
        check_recipe(fine_tuning, TEXT)
    preferences = DPORecipe.model_validate({**common, "actor": actor, "ref": {"path": "package:tiny-moe"}})
    with pytest.raises(RecipeError, match=r"ref\.path=package:tiny-moe is a model that does not take images"):
        check_recipe(preferences, SEEING, {"ref": replace(SEEING, vision=None)})


def test_reward_models_are_refused() -> None:
    model = {"path": "package:tiny-vl", "backend": "megatron:d1"}
    with pytest.raises(RecipeError, match="reward models read text alone"):
        check_recipe(recipe(reward={"fn": "model", "model": model}), SEEING, {"reward": SEEING})


def test_held_out_images_count_too() -> None:
    rows = {"path": "package:squares/test", "image_key": "images", "answer_key": "answer"}
    with pytest.raises(RecipeError, match=re.escape("valid_dataset.image_key=images names images")):
        check_recipe(recipe(train_dataset={"image_key": None}, valid_dataset=rows), TEXT)


@pytest.mark.parametrize(("backend", "deepstack", "fits"), [("p3", 1, True), ("p3", 2, False), ("p2", 2, True)])
def test_the_first_stage_has_the_layers_that_add_features(backend: str, deepstack: int, fits: bool) -> None:
    assert SEEING.vision is not None
    shape = replace(SEEING, vision=replace(SEEING.vision, n_deepstack=deepstack))
    given = recipe(actor={"backend": f"megatron:{backend}"})
    if fits:
        check_recipe(given, shape)
        return
    with pytest.raises(
        RecipeError, match="the first stage has 1 layers, and features of images are added to the first"
    ):
        check_recipe(given, shape)
