"""Estimated times of generation, against runs on two H200s (benchmarks/README.md)."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from fivefold.families.read import find_shape
from fivefold.families.shape import ModelShape
from fivefold.layout.gpus import find_gpu
from fivefold.layout.parser import parse_backend, parse_role
from fivefold.planning.plan import plan_model
from fivefold.planning.recipe_inputs import Changes
from fivefold.planning.rollout_memory import rollout_memory
from fivefold.planning.simulation.decoding import LOGPROB_SECONDS, reading_seconds, sending_seconds, token_seconds
from fivefold.planning.simulation.lengths import Lengths
from fivefold.planning.simulation.run import Setting, simulate

GPU = find_gpu("h200")


def of_layers(n_layers: int) -> ModelShape:
    """Return Qwen3-30B-A3B with the first layers alone."""
    whole = find_shape("Qwen3-30B-A3B")
    return replace(whole, n_layers=n_layers, moe_layers=whole.moe_layers[:n_layers])


def decoding(n_layers: int, layout_text: str = "vllm:d2", tp_on_node: int | None = None) -> tuple[float, ...]:
    """Return the time of a token of Qwen3-30B-A3B with 190 tokens of prompt, halfway through 1,024 of a response."""
    shape, layout = of_layers(n_layers), parse_role(layout_text).resolve()
    memory = rollout_memory(layout, shape, GPU, sequence_length=1214, batch_size=256, element_bytes=2)
    return token_seconds(
        layout, shape, GPU, memory, sequence_length=1214, context=702, slots=256, element_bytes=2,
        tp_on_node=tp_on_node or layout.tp,
    )  # fmt: skip


@pytest.mark.parametrize(("n_layers", "seconds"), [(8, 6.04), (48, 27.1)])
def test_decoding_takes_what_was_measured(n_layers: int, seconds: float) -> None:
    """512 responses of 1,024 tokens on two replicas: the rollout phases of 8 layers, and of the whole model."""
    assert 1024 * decoding(n_layers)[256] == pytest.approx(seconds, rel=0.15)


def setting_on_h200s(layout_text: str, slots: int, lengths: Lengths, **others: Any) -> Setting:
    """Return steps of 512 completions by 8 layers, with the plan's times of decoding."""
    layout, shape = parse_role(layout_text).resolve(), of_layers(8)
    options = {"sequence_length": 190 + lengths.longest, "element_bytes": 2}
    memory = rollout_memory(layout, shape, GPU, batch_size=slots, **options)
    context = 190 + lengths.mean_progress
    times = token_seconds(layout, shape, GPU, memory, context=context, slots=slots, tp_on_node=1, **options)
    return Setting(
        batch_size=64, group_size=8, n_replicas=layout.dp, slots=slots, token_seconds=times, prompt_tokens=190,
        reread_seconds=reading_seconds(layout, shape, GPU), logprob_seconds=LOGPROB_SECONDS, **others,
    )  # fmt: skip


def test_long_tailed_steps_take_what_was_measured() -> None:
    """Two H200s in turn, the mean of three steps, and one for each side, that of ten which waited for answers."""
    n_stops, vocabulary, longest = 380, 151_936, 2048
    random = Random(0)
    ends = math.log(1 - n_stops / vocabulary)
    lengths = Lengths(tuple(min(1 + int(math.log(random.random()) / ends), longest) for _ in range(8000)))
    in_turn = setting_on_h200s("vllm:d2", 256, lengths, train_seconds=2.6, update_seconds=0.3, shares_devices=True)
    beside = setting_on_h200s("vllm:d1", 512, lengths, train_seconds=3.35, update_seconds=0.65, max_age=4)
    assert simulate(in_turn, lengths).seconds == pytest.approx(9.3, rel=0.1)
    assert simulate(beside, lengths).seconds == pytest.approx(5.97, rel=0.1)


def test_fewer_sequences_are_faster_but_not_in_proportion() -> None:
    times = decoding(48)
    assert all(fewer < more for fewer, more in pairwise(times))
    assert times[1] > times[256] / 20
    assert decoding(48, "vllm:d1t2")[256] < times[256]


def test_tensor_parallel_groups_that_cross_nodes_wait_for_the_network() -> None:
    """Two sums in each of 48 layers of 2,048 bfloat16 numbers a token; 7 of 8 parts of them go out twice."""
    inside, across = (decoding(48, "vllm:d1t8", tp_on_node)[256] for tp_on_node in (8, 4))
    n_bytes = 256 * 2 * 48 * 2048 * 2 * 2 * 7 / 8
    assert across - inside == pytest.approx(n_bytes / (0.75 * 4 * GPU.network))


def test_new_weights_take_what_was_measured() -> None:
    """2.3 seconds for the whole model."""
    shape = find_shape("Qwen3-30B-A3B")
    assert sending_seconds(shape, 2) == pytest.approx(2.3, rel=0.15)
    one, two = (reading_seconds(parse_role(text).resolve(), shape, GPU) for text in ("vllm:d1", "vllm:d1t2"))
    assert one == 2 * two


def test_servers_hold_indexers_and_their_keys_and_the_embedded_engine_holds_neither() -> None:
    options: dict[str, Any] = {"sequence_length": 2048, "batch_size": 4, "element_bytes": 2}
    dense, sparse = find_shape("DeepSeek-V3"), find_shape("DeepSeek-V3.2")
    # Queries of 64 heads and the weight of each, and one key, with a norm that has a bias.
    indexers = 61 * (64 * 128 * 1536 + 64 * 7168 + 128 * 7168 + 2 * 128)
    of_server, wanted = (rollout_memory(parse_backend("vllm:t8p2"), each, GPU, **options) for each in (sparse, dense))
    assert of_server.weights - wanted.weights == indexers * 2 // 16
    # Each rank has the keys of its stage's layers, one byte a channel and a scale.
    assert of_server.least_cache - wanted.least_cache == pytest.approx(2048 * 61 * (128 + 4) / 2, abs=1)
    embedded, wanted = (
        rollout_memory(parse_backend("transformers:d8"), each, GPU, **options) for each in (sparse, dense)
    )
    assert embedded == wanted


def test_a_model_is_planned_for_sequences_of_which_its_attention_sees_all() -> None:
    actor = "megatron:(attn:p8t8d8|ffn:p8e64)"
    assert plan_model("GLM-5", 512, gpu="h200", actor=actor).inputs.actor.work.sequence_length == 2048
    assert plan_model("DeepSeek-V3", 512, gpu="h200", actor=actor).inputs.actor.work.sequence_length == 4096
    with pytest.raises(ValueError, match=r"--sequence-length 4096: the model .* up to index_topk=2048 tokens"):
        plan_model("GLM-5", 512, gpu="h200", changes=Changes(sequence_length=4096))
