"""Memory of the model that judges, in the plan of the recipe that has one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fivefold.config.load import load_any_recipe
from fivefold.families.read import SHAPES, find_shape
from fivefold.layout.backends import BACKENDS
from fivefold.planning.estimates import Estimate, RolloutEstimate
from fivefold.planning.plan import plan_recipe

RECIPE = Path(__file__).parents[3] / "recipes" / "qwen3-8b-judge-8gpus.yaml"
IN_TURN = [
    "reward.judge.colocate=true", "reward.judge.backend=vllm:d2t4", "actor.backend=megatron:d2p2t2",
    "rollout.backend=vllm:d8",
]  # fmt: skip
JUDGE = find_shape("Qwen3-32B")


def planned(*overrides: str) -> Estimate:
    plan = plan_recipe(load_any_recipe(RECIPE, list(overrides)), gpu="h100-80g")
    assert plan.estimate is not None
    return plan.estimate


def generating(estimate: Estimate) -> dict[str, RolloutEstimate]:
    return {rollout.placed.role: rollout for rollout in estimate.rollouts}


def test_its_weights_and_its_cache_are_those_of_its_own_model() -> None:
    estimate = planned()
    judge, rollout = (generating(estimate)[name] for name in ("judge", "rollout"))
    assert judge.memory.weights == 2 * JUDGE.n_parameters // 2
    assert rollout.memory.weights == 2 * find_shape("Qwen3-8B").n_parameters
    # A layer's keys and values of 8 heads of 128, of a sequence of 6,144 tokens, over two ranks.
    assert judge.memory.least_cache == 64 * 2 * 8 * 128 * 2 * 6144 // 2
    assert judge.memory.sequences == judge.memory.kv_cache // judge.memory.least_cache
    assert (judge.others, judge.arriving) == (0, 0)
    assert (
        generating(planned("reward.judge.max_length=3072"))["judge"].memory.least_cache * 2 == judge.memory.least_cache
    )
    assert generating(planned("reward.judge.dtype=float32"))["judge"].memory.weights == 2 * judge.memory.weights


def test_on_shared_devices_the_others_make_room_and_it_sleeps_on_the_host() -> None:
    apart, shared = planned(), planned(*IN_TURN)
    judge, asleep = generating(shared)["judge"], BACKENDS["vllm"].asleep_bytes
    assert shared.fits
    assert shared.offloaded == ("params", "grads", "optimizer")
    assert judge.others == generating(shared)["rollout"].others > asleep
    (actor,) = shared.models
    assert actor.others == 2 * asleep

    # Eight ranks of two servers, each with a quarter of the weights in host memory; alone, it never sleeps.
    def of_trainers(estimate: Estimate) -> int:
        (model,) = estimate.models
        ranks = model.placed.layout.world_size // len(model.memory)
        return sum(ranks * stage.on_host(estimate.offloaded) for stage in model.memory)

    assert shared.host_memory[0].state - of_trainers(shared) == 8 * (2 * JUDGE.n_parameters // 4)
    assert apart.host_memory[0].state == of_trainers(apart)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["reward.judge.path=Qwen2.5-72B"], r"judge: .*split replicas further \(t\)"),
        (
            ["reward.judge.backend=transformers:d4", "reward.judge.max_length=32768"],
            r"judge: a rank needs .* lower reward\.judge\.max_batch_size",
        ),
        (["reward.judge.memory_fraction=0.3"], r"judge: .*split replicas further \(t\)"),
        (["reward.judge.backend=vllm:d1t3"], "judge: "),
    ],
)
def test_a_judge_that_does_not_fit_is_a_problem(overrides: list[str], problem: str) -> None:
    lines = planned(*overrides).problems
    assert any(re.search(problem, line) for line in lines), lines


def test_the_plan_says_what_its_time_leaves_out() -> None:
    assert any(line.startswith("reward.judge answers a question about each sample") for line in planned().notes)


def test_quantized_files_have_one_byte_for_each_weight_of_a_layers_matrices(tmp_path: Path) -> None:
    config = json.loads((SHAPES / "Qwen3-32B.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    judge = generating(planned(f"reward.judge.path={tmp_path}"))["judge"]
    assert judge.memory.weights == (2 * JUDGE.n_parameters - JUDGE.layer_matrix_weights) // 2
