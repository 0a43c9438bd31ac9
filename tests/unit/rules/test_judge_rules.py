"""Rules of the model that judges: its engine, its devices, and its own tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fivefold.config.problems import RecipeError
from fivefold.config.schema.train import TrainRecipe
from fivefold.families.read import find_shape
from fivefold.rules.recipe import check_recipe
from tests.unit.rules.test_rules import DENSE

JUDGE = replace(DENSE, vocab=999, max_positions=4096)


def recipe(judge: dict[str, Any], kwargs: dict[str, Any] | None = None, **changes: Any) -> TrainRecipe:
    """Return a recipe on eight GPUs: two for the actor, two for the rollout, and those of the judge."""
    base: dict[str, Any] = {
        "experiment_name": "check",
        "cluster": {"n_nodes": 1, "n_gpus_per_node": 8},
        "actor": {"path": "m", "backend": "megatron:d2"},
        "rollout": {"backend": "vllm:d2"},
        "train_dataset": {"path": "d"},
        "reward": {"fn": "judge", "kwargs": kwargs or {}, "judge": {"path": "j", "max_length": 2048, **judge}},
    }
    return TrainRecipe.model_validate({**base, **changes})


def check(asked: TrainRecipe) -> None:
    check_recipe(asked, DENSE, {"judge": JUDGE})


@pytest.mark.parametrize(
    "judge",
    [
        {"backend": "vllm:d1t2"},
        {"backend": "sglang:d4", "memory_fraction": 0.7, "server_args": ["--x"]},
        {"backend": "transformers:d4"},
        {"backend": "vllm:d2", "colocate": True},
    ],
)
def test_a_judge_reads_its_own_tokens_on_any_engine(judge: dict[str, Any]) -> None:
    check(recipe(judge))


@pytest.mark.parametrize(
    ("judge", "kwargs", "problem"),
    [
        ({"backend": "megatron:d4"}, {}, "the judge cannot run megatron, which trains; generate with transformers"),
        ({"backend": "vllm:t5"}, {}, "judge: "),
        ({"server_args": ["--x"]}, {}, r"judge\.server_args=.* is for servers .*, and the judge runs transformers"),
        (
            {"max_length": 5000},
            {},
            r"reward\.judge\.max_length=5000 is too much: the model has 4096 positions; lower it",
        ),
        ({"max_length": 600}, {"max_tokens": 600}, r"reward\.kwargs\.max_tokens=600 leaves no room for a question"),
        ({"max_length": 500}, {}, r"reward\.kwargs\.max_tokens=512 leaves no room for a question"),
        ({"backend": "vllm:d4"}, {"temperature": 3.0}, r"reward\.kwargs\.temperature=3\.0: vLLM samples with"),
    ],
)
def test_what_its_engine_or_its_model_cannot_do(judge: dict[str, Any], kwargs: dict[str, Any], problem: str) -> None:
    with pytest.raises(RecipeError, match=problem):
        check(recipe(judge, kwargs))


def test_in_asynchronous_training_it_has_devices_of_its_own() -> None:
    ahead = {"rollout": {"backend": "vllm:d2", "max_head_offpolicyness": 1}}
    check(recipe({"backend": "vllm:d4"}, **ahead))
    shared = "the judge has devices in turn with actor, which asynchronous training"
    with pytest.raises(RecipeError, match=shared):
        check(recipe({"backend": "vllm:d2", "colocate": True}, **ahead))
    lists = {
        "actor": {"path": "m", "backend": "megatron:d2", "device_mapping": [0, 1]},
        "rollout": {"backend": "vllm:d2", "device_mapping": [2, 3], "max_head_offpolicyness": 1},
    }
    check(recipe({"backend": "vllm:d2", "device_mapping": [4, 5]}, **lists))
    with pytest.raises(RecipeError, match="in turn with rollout"):
        check(recipe({"backend": "vllm:d2", "device_mapping": [3, 4]}, **lists))


@pytest.mark.parametrize(
    ("mode", "problem"),
    [
        ("vllm[rollout]:d2|megatron[actor]:d2+vllm[judge]:d4", None),
        ("vllm[rollout]:d2|megatron[actor]:d2", "allocation_mode lays out no judge; add one"),
        ("vllm[rollout]:d2|megatron[actor]:d2|vllm[judge]:d2", "judge.colocate=false contradicts the `|`"),
    ],
)
def test_one_string_lays_it_out_too(mode: str, problem: str | None) -> None:
    asked = recipe({"colocate": False}, allocation_mode=mode, actor={"path": "m"}, rollout={})
    if problem is None:
        check(asked)
        return
    with pytest.raises(RecipeError) as caught:
        check(asked)
    assert problem in str(caught.value)


def test_a_layout_of_a_judge_that_is_not_there_is_refused() -> None:
    mode = "vllm[rollout]:d2|megatron[actor]:d2+vllm[judge]:d4"
    asked = recipe({}, allocation_mode=mode, actor={"path": "m"}, rollout={}, reward={"fn": "math"})
    with pytest.raises(RecipeError, match=r"no judge: set reward\.judge\.path, or drop it"):
        check_recipe(asked, DENSE)


def test_servers_judge_with_sparse_attention_and_the_embedded_engine_with_dense() -> None:
    judge = replace(find_shape("GLM-5"), vocab=DENSE.vocab)
    check_recipe(recipe({"backend": "vllm:d4", "max_length": 4096}), DENSE, {"judge": judge})
    check_recipe(recipe({"backend": "transformers:d4", "max_length": 2048}), DENSE, {"judge": judge})
    with pytest.raises(RecipeError, match=r"judge\.max_length=4096 is too much: .* up to index_topk=2048 tokens"):
        check_recipe(recipe({"backend": "transformers:d4", "max_length": 4096}), DENSE, {"judge": judge})
