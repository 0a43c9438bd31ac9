"""Batches of passes without gradients become their own token budgets."""

from __future__ import annotations

from typing import Any

import pytest
from dialect_conversion import convert_words

from fivefold_import.framework import Framework

ACTOR, CRITIC, REF = (
    "actor.mb_spec.max_tokens_per_infer_mb",
    "critic.mb_spec.max_tokens_per_infer_mb",
    "ref.mb_spec.max_tokens_per_mb",
)
TREE = "actor_rollout_ref."
LENGTHS = ("data.max_prompt_length=100", "data.max_response_length=400", "data.train_batch_size=8")
WITH_KL = f"{TREE}actor.use_kl_loss=true"
DYNAMIC = (f"{TREE}actor.strategy=megatron", f"{TREE}actor.use_dynamic_bsz=true")
SHARDS = f"{TREE}actor.megatron.context_parallel_size=2"
ROLL = ("prompt_length=100", "response_length=400", "actor_train.infer_batch_size=3", "reference.infer_batch_size=4")

CASES: list[tuple[Framework, tuple[str, ...], dict[str, int]]] = [
    ("roll", (*ROLL, "use_kl_loss=true", "kl_loss_coef=0.1"), {ACTOR: 1500, REF: 2000}),
    ("roll", (*ROLL, "adv_estimator=gae", "critic.infer_batch_size=5"), {ACTOR: 1500, CRITIC: 2500}),
    (
        "roll",
        (
            *ROLL,
            "actor_train.use_dynamic_batching_in_infer=true",
            "actor_train.max_tokens_per_microbatch_in_infer=700",
        ),
        {ACTOR: 700},
    ),
    (
        "verl",
        (*LENGTHS, WITH_KL, *(f"{TREE}{role}.log_prob_micro_batch_size_per_gpu=3" for role in ("rollout", "ref"))),
        {ACTOR: 1500, REF: 1500},
    ),
    ("verl", (*LENGTHS, f"{TREE}ref.log_prob_micro_batch_size_per_gpu=3"), {}),
    ("siirl", (*LENGTHS, *DYNAMIC, SHARDS, f"{TREE}rollout.log_prob_max_token_len_per_gpu=700"), {ACTOR: 1400}),
    (
        "verl",
        (*LENGTHS, "algorithm.adv_estimator=gae", "critic.forward_micro_batch_size_per_gpu=2"),
        {CRITIC: 1000},
    ),
    ("areal", ("actor.kl_ctl=0.1", "ref.mb_spec.max_tokens_per_mb=700"), {REF: 700}),
    ("areal", ("actor.kl_ctl=0.0", "ref.mb_spec.max_tokens_per_mb=700"), {}),
]


@pytest.mark.parametrize(("framework", "words", "budgets"), CASES)
def test_batches_of_passes_without_gradients_become_budgets(
    framework: Framework, words: tuple[str, ...], budgets: dict[str, Any]
) -> None:
    conversion = convert_words(framework, *words)
    keys = [word.partition("=")[0] for word in words if "infer" in word or "log_prob" in word or "forward" in word]
    assert {key: conversion.recipe[key] for key in (ACTOR, CRITIC, REF) if key in conversion.recipe} == budgets
    assert not conversion.unsupported() & set(keys)
