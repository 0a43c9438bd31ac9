"""Keys about data, chats, sampling and evaluation become the recipe's, for each framework that has them."""

from __future__ import annotations

from typing import Any

import pytest
from dialect_conversion import convert_fixture, convert_words

from fivefold_import.framework import Framework

VAL = "actor_rollout_ref.rollout.val_kwargs."
HELD_OUT = "validation.generating_args."
EVAL = "buffer.explorer_input.eval_tasksets."
SAMPLED = [f"{VAL}do_sample=true", f"{VAL}temperature=0.6", "data.val_files=v.parquet"]


@pytest.mark.parametrize(
    ("framework", "fixture", "words", "expected"),
    [
        ("verl", "verl_grpo_megatron.sh", ["trainer.val_before_train=false"], {"evaluator.before_training": False}),
        (
            "verl",
            "verl_grpo_megatron.sh",
            [*SAMPLED, f"{VAL}top_p=0.95", f"{VAL}top_k=20"],
            {"evaluator.temperature": 0.6, "evaluator.top_p": 0.95, "evaluator.top_k": 20},
        ),
        # What is not written is not as in training: verl then samples from the whole distribution.
        (
            "verl",
            "verl_grpo_megatron.sh",
            [*SAMPLED, "actor_rollout_ref.rollout.top_p=0.5"],
            {"gconfig.top_p": 0.5, "evaluator.top_p": 1.0},
        ),
        (
            "verl",
            "verl_grpo_megatron.sh",
            ["data.val_files=[a.parquet,b.parquet]", "data.train_files=[c.parquet,d.parquet]"],
            {"valid_dataset.path": ["a.parquet", "b.parquet"], "train_dataset.path": ["c.parquet", "d.parquet"]},
        ),
        (
            "verl",
            "verl_grpo_megatron.sh",
            ["+data.apply_chat_template_kwargs.enable_thinking=false"],
            {"chat_template_kwargs.enable_thinking": False},
        ),
        (
            "verl",
            "verl_grpo_megatron.sh",
            ["data.truncation=left", "data.filter_overlong_prompts=false", "data.val_files=v.parquet"],
            {"train_dataset.truncation": "left", "valid_dataset.truncation": "left"},
        ),
        ("roll", "roll_grpo_moe.yaml", ["advantage_clip=3"], {"actor.advantage_clip": 3.0}),
        (
            "roll",
            "roll_grpo_moe.yaml",
            ["difficulty_mask=true", "difficulty_low_threshold=0.2"],
            {"actor.group_mean_above": 0.2, "actor.group_mean_below": 0.95},
        ),
        (
            "roll",
            "roll_grpo_moe.yaml",
            [f"{HELD_OUT}temperature=0.6", f"{HELD_OUT}top_p=0.9", f"{HELD_OUT}top_k=7"],
            {"evaluator.temperature": 0.6, "evaluator.top_p": 0.9, "evaluator.top_k": 7},
        ),
        (
            "verl",
            "verl_grpo_megatron.sh",
            ["+actor_rollout_ref.rollout.repetition_penalty=1.2"],
            {"gconfig.repetition_penalty": 1.2},
        ),
        (
            "trinity",
            "trinity_grpo.yaml",
            ["explorer.rollout_model.repetition_penalty=1.3"],
            {"gconfig.repetition_penalty": 1.3},
        ),
        (
            "verl",
            "verl_grpo_megatron.sh",
            ["actor_rollout_ref.actor.optim.betas='[0.8,.95]'"],
            {"actor.optimizer.beta1": 0.8, "actor.optimizer.beta2": 0.95},
        ),
        (
            "roll",
            "roll_grpo_moe.yaml",
            ["actor_train.data_args.enable_thinking=true", "actor_infer.generating_args.repetition_penalty=1.1"],
            {"chat_template_kwargs.enable_thinking": True, "gconfig.repetition_penalty": 1.1},
        ),
        (
            "trinity",
            "trinity_grpo.yaml",
            [
                "model.enable_thinking=false",
                "model.custom_chat_template='{{ messages }}'",
                "explorer.eval_on_startup=false",
            ],
            {
                "chat_template_kwargs.enable_thinking": False,
                "chat_template": "{{ messages }}",
                "evaluator.before_training": False,
            },
        ),
        (
            "trinity",
            "trinity_grpo.yaml",
            ["synchronizer.sync_interval=4", "synchronizer.sync_offset=1"],
            {"rollout.sync_freq_steps": 4, "rollout.max_head_offpolicyness": 4},
        ),
        (
            "trinity",
            "trinity_grpo.yaml",
            [
                "buffer.explorer_input.taskset.format.system_prompt='Be brief.'",
                f"{EVAL}1.repeat_times=4",
                f"{EVAL}1.rollout_args.temperature=0.6",
                f"{EVAL}1.rollout_args.top_p=0.8",
            ],
            {
                "train_dataset.system_prompt": "Be brief.",
                "valid_datasets.others.path": "some/other",
                "valid_datasets.others.system_prompt": "Be brief.",
                "valid_datasets.sums-eval.prompt_key": "question",
                "evaluator.n_samples": 4,
                "evaluator.top_p": 0.8,
            },
        ),
        (
            "areal",
            "areal_grpo_fsdp.yaml",
            [f"eval_gconfig.{word}" for word in ("temperature=0.5", "top_p=0.9", "top_k=5", "max_new_tokens=77")],
            {"evaluator.top_p": 0.9, "evaluator.top_k": 5, "evaluator.max_new_tokens": 77},
        ),
    ],
)
def test_a_key_of_the_framework_is_one_of_the_recipe(
    framework: Framework, fixture: str, words: list[str], expected: dict[str, Any]
) -> None:
    conversion = convert_fixture(framework, fixture, words)
    assert {key: conversion.recipe.get(key) for key in expected} == expected
    assert not conversion.report.problems
    names = {word.partition("=")[0].lstrip("+") for word in words}
    assert not names & conversion.unsupported()


def test_what_other_keys_switch_off_is_implied() -> None:
    long = convert_words("verl", "data.truncation=left", "data.filter_overlong_prompts=true")
    assert "train_dataset.truncation" not in long.recipe
    assert long["data.truncation"].outcome == "implied"
    assert "data.truncation" in convert_words("verl", "data.truncation=middle").unsupported()
    kept = convert_words("roll", "difficulty_mask=false", "difficulty_low_threshold=0.2")
    assert "actor.group_mean_above" not in kept.recipe
    assert kept["difficulty_low_threshold"].note == "only difficulty_mask reads this"
    greedy = convert_words("verl", f"{VAL}top_p=0.5", "data.val_files=v.parquet")
    assert "evaluator.top_p" not in greedy.recipe
    assert greedy[f"{VAL}top_p"].note == "evaluation is greedy"
