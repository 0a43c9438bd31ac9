"""Memory while weights go from the actor to a rollout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fivefold.config.load import load_any_recipe
from fivefold.families.read import find_shape
from fivefold.layout.parser import parse_role
from fivefold.planning.plan import plan_recipe
from fivefold.planning.sending import sending_bytes
from fivefold.report.plan.as_json import plan_as_json
from fivefold.weights.table import TRANSPORTS

RECIPE = Path(__file__).parents[3] / "recipes" / "qwen3-30b-a3b-2xh200.yaml"
MIB = 2**20
EMBEDDING = 2 * 151_936 * 2048
"""Bytes of the largest tensor of Qwen3-30B-A3B in bfloat16, which is larger than a bucket."""


@pytest.mark.parametrize(("transport", "buckets"), [("ipc", 2 * EMBEDDING), ("nccl", EMBEDDING), ("folder", 128 * MIB)])
def test_buckets_hold_the_largest_tensor(transport: str, buckets: int) -> None:
    shape = find_shape("Qwen3-30B-A3B")
    whole, cut = (
        sending_bytes(layout, shape, TRANSPORTS[transport], element_bytes=2)
        for layout in (parse_role(text).resolve(2) for text in ("megatron:d2", "megatron:d2e2"))
    )
    assert whole == buckets
    # Shards are gathered beside the buckets.
    assert cut == buckets + EMBEDDING


def roles(gpu: str, *overrides: str) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Return a rank of the actor, the rollout, and the plan's problems."""
    plan = plan_as_json(plan_recipe(load_any_recipe(RECIPE, ["actor.path=Qwen3-30B-A3B", *overrides]), gpu=gpu))
    by_role = {role["role"]: role for role in plan["roles"]}
    return by_role["actor"]["memory"][0], by_role["rollout"], plan["problems"]


@pytest.mark.parametrize("offloads_params", ["true", "false"])
def test_two_copies_of_the_weights_are_on_a_gpu_while_they_are_sent(offloads_params: str) -> None:
    keys = (f"actor.offload.params={offloads_params}", "cluster.host_memory_gib=null")
    actor, rollout, problems = roles("h200-141g", *keys)
    asleep = 4_600_000_000
    assert rollout["memory"]["arriving"] == pytest.approx(
        rollout["memory"]["weights"] + asleep + actor["weights"] + actor["context"] + actor["sending"], abs=1e8
    )
    assert problems == []


def test_a_gpu_without_room_for_both_copies_is_a_problem() -> None:
    """On 85 GB there is room for the rollout's 61 GB of weights and its cache, but not next to 32 GB of the actor's."""
    _, rollout, problems = roles("h100-80g", "actor.offload.params=true")
    assert rollout["memory"]["total"] + rollout["memory"]["waiting_roles"] < 84.9e9
    assert any(
        line.startswith("rollout: while new weights arrive, a GPU holds 100.8 GB, of the 84.9") for line in problems
    )


def test_frozen_weights_are_sent_from_the_host_where_two_copies_do_not_fit() -> None:
    alone = ("actor.backend=megatron:d1", "rollout.backend=vllm:d1", "cluster.n_gpus_per_node=1", "actor.lora.rank=32")
    short = (*alone, "actor.mb_spec.max_tokens_per_mb=8192", "cluster.host_memory_gib=128")
    actor, rollout, problems = roles("h100-80g", *short)
    asleep = 4_600_000_000
    trained = actor["weights"] - actor["frozen"]
    assert 0.3e9 < trained < 1e9
    assert rollout["memory"]["arriving"] == pytest.approx(
        rollout["memory"]["weights"] + asleep + trained + actor["context"] + actor["sending"], abs=1e8
    )
    assert problems == []
    _, roomy, problems = roles("h200-141g", *short)
    assert roomy["memory"]["arriving"] == pytest.approx(rollout["memory"]["arriving"] + actor["frozen"], abs=1e8)
    assert problems == []
    _, _, problems = roles("h100-80g", *short, "actor.offload.params=false")
    assert any("rollout: a rank needs" in line or "while new weights arrive" in line for line in problems)


def test_only_fivefolds_own_bridge_sends_frozen_weights_from_the_host() -> None:
    layers = ("actor.backend=megatron:d1", "rollout.backend=vllm:d1", "cluster.n_gpus_per_node=1")
    frozen = (*layers, "actor.mb_spec.max_tokens_per_mb=8192", 'actor.freeze=["model.layers.*"]')
    actor, rollout, _ = roles("h100-80g", *frozen)
    other, both_copies, _ = roles("h100-80g", *frozen, "actor.megatron.bridge_type=mbridge")
    assert (actor["frozen"] > 59e9, other["frozen"]) == (True, 0)
    assert both_copies["memory"]["arriving"] == pytest.approx(rollout["memory"]["arriving"] + actor["frozen"], abs=1e8)


def test_quantized_weights_leave_more_room_for_the_cache() -> None:
    """Embeddings, output layer, routers and norms stay in bfloat16."""
    shape = find_shape("Qwen3-30B-A3B")
    _, plain, _ = roles("h200-141g")
    _, quantized, problems = roles("h200-141g", "rollout.quantization=fp8_per_block")
    kept = 2 * shape.vocab * shape.hidden + 48 * (128 * 2048 + 2 * 128 + 2 * 2048) + 2048
    matrices = shape.n_parameters - kept
    assert quantized["memory"]["weights"] == matrices + 2 * kept
    assert plain["memory"]["weights"] == 2 * (matrices + kept)
    assert quantized["memory"]["kv_cache"] == plain["memory"]["kv_cache"] + matrices
    assert problems == []


def test_a_server_that_drafts_tokens_holds_a_further_layer_with_its_keys_and_values() -> None:
    """GLM-4.5-Air's files: attention with biases, 128 experts and a shared one, two joined inputs, five norms."""
    path = RECIPE.with_name("glm-4.5-air-8x8.yaml")

    def rollout(*overrides: str) -> dict[str, Any]:
        plan = plan_as_json(plan_recipe(load_any_recipe(path, ["actor.path=GLM-4.5-Air", *overrides]), gpu="h100-80g"))
        return next(role for role in plan["roles"] if role["role"] == "rollout")["memory"]

    drafting, plain = rollout(), rollout("rollout.speculative=null")
    hidden, heads = 4096, 96 + 2 * 8
    attention = (heads + 96) * 128 * hidden + heads * 128
    experts = 129 * 3 * hidden * 1408 + 128 * (hidden + 1)
    layer = 2 * (attention + experts + 2 * hidden**2 + 5 * hidden)
    assert drafting["weights"] - plain["weights"] == pytest.approx(layer / 8, abs=1)
    tokens = drafting["sequences"] / plain["sequences"] * plain["kv_cache"] / drafting["kv_cache"]
    assert tokens == pytest.approx(46 / 47, rel=0.005)
    by_ngrams = rollout("rollout.speculative.method=ngram")
    assert by_ngrams == plain
