"""Teachers and reward models of other frameworks."""

from __future__ import annotations

from typing import Any

import pytest
from dialect_conversion import convert_words

from fivefold_import.framework import Framework

VERL = (
    "distillation.enabled=True",
    "distillation.nnodes=1",
    "distillation.teacher_models.math.model_path=big",
    "distillation.teacher_models.math.inference.tensor_model_parallel_size=2",
)
LOSS = "distillation.distillation_loss."
TRINITY = ("algorithm.algorithm_type=on_policy_distill", "model.model_path=m")


@pytest.mark.parametrize(
    ("framework", "words", "expected"),
    [
        (
            "verl",
            (*VERL, f"{LOSS}loss_mode=k1", f"{LOSS}use_policy_gradient=True", f"{LOSS}distillation_loss_coef=0.2"),
            {"coeff": 0.2, "over": "sampled"},
        ),
        (
            "roll",
            ("student_train.model_args.model_name_or_path=m", "teacher.model_args.model_name_or_path=big"),
            {"coeff": 1.0, "advantage": "none"},
        ),
    ],
)
def test_a_teacher_on_the_students_samples_is_converted(
    framework: Framework, words: tuple[str, ...], expected: dict[str, Any]
) -> None:
    conversion = convert_words(framework, *words)
    recipe = conversion.recipe
    assert recipe["teacher.path"] == "big"
    own = {key: recipe.get(f"actor.{key}", recipe.get(f"actor.distill.{key}")) for key in expected}
    assert own == {key: value if value != "sampled" else own[key] for key, value in expected.items()}
    assert recipe.get("actor.distill.over", "sampled") == expected.get("over", "sampled")
    assert conversion.unsupported() == set()
    assert "actor.kl_ctl" not in recipe or framework != "trinity"


def test_several_teachers_of_verl_have_the_prompts_of_their_keys() -> None:
    at = "distillation.teacher_models."
    words = (
        *VERL, f"{at}math.key=openai/gsm8k", f"{at}code.key=kodcode", f"{at}code.model_path=other",
        "distillation.teacher_key=data_source", f"{LOSS}loss_mode=k1", f"{LOSS}use_policy_gradient=True",
    )  # fmt: skip
    conversion = convert_words("verl", *words)
    recipe = conversion.recipe
    assert conversion.unsupported() == set()
    assert "teacher.path" not in recipe
    assert (recipe["teachers.math.path"], recipe["teachers.code.path"]) == ("big", "other")
    assert (recipe["teachers.math.data_sources"], recipe["teachers.code.data_sources"]) == (
        ["openai/gsm8k"], ["kodcode"],
    )  # fmt: skip
    assert recipe["teachers.math.backend"] == recipe["teachers.code.backend"] == recipe["actor.backend"]
    by_other = convert_words("verl", *words[:-3], "distillation.teacher_key=ability")
    assert by_other.recipe["teacher.path"] == "big"
    assert {"distillation.teacher_key", f"{at}code.model_path"} <= by_other.unsupported()


def test_mixed_divergences_keep_the_teachers_share() -> None:
    trinity = ("algorithm.algorithm_type=jsd", "model.model_path=m", "explorer.auxiliary_models.0.model_path=big")
    arguments = "algorithm.advantage_fn_args."
    for words, expected in (
        ((f"{arguments}lambda_coef=0.3",), {"direction": "jsd", "teacher_share": 0.3, "coeff": 1.0}),
        ((f"{arguments}kl_coef=0.4",), {"direction": "jsd", "teacher_share": 0.5, "coeff": 0.4}),
        ((f"{arguments}lambda_coef=1",), {"direction": "forward"}),
        ((f"{arguments}lambda_coef=0.0",), {"direction": "reverse"}),
    ):
        recipe = convert_words("trinity", *trinity, *words).recipe
        assert (recipe["teacher.path"], recipe["actor.distill.over"]) == ("big", "top_k")
        assert {name: recipe[f"actor.distill.{name}"] for name in expected} == expected
    nemo = convert_words(
        "nemo_rl", "distillation.topk_logits_k=32", "teacher.model_name=big", "policy.model_name=m",
        "loss_fn.kl_type=mixed", "loss_fn.mixed_kl_weight=0.3",
    ).recipe  # fmt: skip
    assert (nemo["actor.distill.direction"], nemo["actor.distill.teacher_share"]) == ("mixed", 0.3)


def test_bounds_of_verls_divergence_are_kept() -> None:
    bounds = (f"{LOSS}loss_max_clamp=10.0", f"{LOSS}log_prob_min_clamp=-5.0")
    top_k = convert_words("verl", *VERL, *bounds, f"{LOSS}loss_mode=forward_kl_topk")
    assert top_k.unsupported() == set()
    assert (top_k.recipe["actor.distill.max_divergence"], top_k.recipe["actor.distill.min_logprob"]) == (10.0, -5.0)
    sampled = convert_words("verl", *VERL, *bounds, f"{LOSS}loss_mode=k1", f"{LOSS}use_policy_gradient=True")
    assert sampled.recipe["actor.distill.max_divergence"] == 10.0
    assert sampled[bounds[1].partition("=")[0]].outcome == "implied"


def test_what_a_teacher_cannot_do_is_told() -> None:
    words = (
        *VERL,
        f"{LOSS}loss_mode=k3",
        "distillation.teacher_models.b.model_path=other",
    )
    conversion = convert_words("verl", *words)
    assert conversion.recipe["teacher.path"] == "big"
    assert conversion.unsupported() == {
        f"{LOSS}loss_mode",
        "distillation.teacher_models.b.model_path",
    }
    without = convert_words("verl", "distillation.enabled=False", f"{LOSS}topk=3")
    assert without.unsupported() == set()
    assert not [key for key in without.recipe if key.startswith(("teacher", "actor.distill"))]
    assert "teacher.path" in convert_words("trinity", *TRINITY).report.to_give


@pytest.mark.parametrize("own", ["reward.", "rewards.liked."])
def test_a_reward_model_of_roll_becomes_the_reward(own: str) -> None:
    model = f"{own}model_args."
    words = [
        f"{model}model_name_or_path=judge",
        f"{model}model_type=auto_sequence_classification",
        f"{model}dtype=bf16",
    ]
    conversion = convert_words("roll", *words, f"{own}device_mapping=list(range(0,8))", f"{own}infer_batch_size=4")
    assert conversion.recipe["reward.fn"] == "model"
    assert conversion.recipe["reward.model.path"] == "judge"
    assert conversion.unsupported() == set()
    # A model without such a head writes its judgement.
    assert convert_words("roll", words[0], f"{own}device_mapping=0").unsupported() >= {f"{model}model_name_or_path"}


def test_a_frozen_model_on_megatron_keeps_its_layout() -> None:
    section = "reward_model."
    verl = [f"{section}enable=true", f"{section}model.path=judge", f"{section}strategy=megatron"]
    degrees = [f"{section}megatron.tensor_model_parallel_size=4", "actor_rollout_ref.actor.strategy=megatron"]
    recipe = convert_words("verl", *verl, *degrees).recipe
    assert (recipe["actor.backend"], recipe["reward.model.backend"]) == ("megatron:d8", "megatron:d2t4")
