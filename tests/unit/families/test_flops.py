"""Floating-point operations against rules of thumb: six for each weight and token, and attention counted by pairs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fivefold.config.schema.lora import LoraConfig
from fivefold.families.backward import training_flops, with_backward
from fivefold.families.flops import BACKWARD_AND_FORWARD, ForwardFlops, PartFlops
from fivefold.families.read import find_shape
from fivefold.families.shape import ModelShape


def training_parts(shape: ModelShape, n_sequences: int, length: int) -> PartFlops:
    return ForwardFlops.of(shape).on_equal(n_sequences, length).scaled(BACKWARD_AND_FORWARD)


@pytest.mark.parametrize("name", ["Qwen3-8B", "Qwen2.5-7B", "Qwen3-30B-A3B", "Mixtral-8x7B", "DeepSeek-V3"])
def test_matmuls_are_six_flops_for_each_weight_that_multiplies_a_token(name: str) -> None:
    shape = find_shape(name)
    parts = training_parts(shape, 3, 1000)
    look_up = 0 if shape.tied_embeddings else shape.vocab * shape.hidden
    # Norms and biases are no matrices.
    assert parts.total - parts.attention == pytest.approx(6 * 3000 * (shape.n_active_parameters - look_up), rel=1e-3)


def test_attention_is_two_matmuls_over_half_of_all_pairs() -> None:
    """Qwen3-8B has 36 layers of 32 query heads that are 128 wide."""
    pairs = 3 * 1000 * 1000 / 2
    assert training_parts(find_shape("Qwen3-8B"), 3, 1000).attention == 3 * 36 * 32 * 2 * (2 * 128) * pairs


def test_attention_in_a_window_is_over_the_pairs_in_it() -> None:
    """GPT-OSS has windows of 128 tokens in every second of its layers, of 64 query heads that are 64 wide."""
    shape = find_shape("gpt-oss-20b")
    for length in (100, 128, 300):
        pairs = sum(min(query + 1, 128) for query in range(length)) - length / 2
        of_windows = 12 * 64 * 2 * (2 * 64) * pairs
        of_others = 12 * 64 * 2 * (2 * 64) * length * length / 2
        both = ForwardFlops.of(shape).on([length], length).attention
        assert both == pytest.approx(of_windows + of_others, rel=0.01)
        assert both == ForwardFlops.of(shape).on_equal(1, length).attention


def test_ragged_sequences_pay_for_their_own_pairs_and_for_the_logits_that_they_get() -> None:
    shape = find_shape("Qwen3-30B-A3B")
    alone = [training_parts(shape, 1, length) for length in (500, 20)]
    unpredicted = 3 * 2 * 100 * shape.hidden * shape.vocab
    whole = sum(parts.total for parts in alone)
    assert training_flops(shape, [500, 20], 420) == pytest.approx(whole - unpredicted)


def frozen(shape: ModelShape, *patterns: str) -> ModelShape:
    return replace(shape, frozen=patterns)


def test_frozen_weights_have_no_gradient_and_nothing_goes_backward_through_layers_before_the_first_trained_one() -> (
    None
):
    shape = find_shape("Qwen3-30B-A3B")
    forward = ForwardFlops.of(shape).on_equal(3, 1000)
    without_experts = with_backward(frozen(shape, "*.experts.*"), forward)
    assert without_experts == replace(forward.scaled(3), experts=2 * forward.experts)
    # 36 of 48 layers and the embedding are frozen: these go forward alone.
    upper = [f"model.layers.{layer}.*" for layer in range(36)]
    part = with_backward(frozen(shape, "model.embed_tokens.weight", *upper), forward)
    assert part.head == 3 * forward.head
    assert part.experts == pytest.approx(forward.experts * (36 / 48 + 3 * 12 / 48))
    assert part.attention == pytest.approx(forward.attention * (36 / 48 + 3 * 12 / 48))
    # The lower layers are frozen and the embedding is not: their inputs need gradients.
    through = with_backward(frozen(shape, *upper), forward)
    assert through.projections == pytest.approx(forward.projections * (2 * 36 / 48 + 3 * 12 / 48))
    assert through.attention == pytest.approx(3 * forward.attention)


def test_adapters_need_gradients_of_all_inputs_and_of_no_weight() -> None:
    shape = find_shape("Qwen3-30B-A3B").with_lora(LoraConfig(rank=8))
    forward = ForwardFlops.of(shape).on_equal(3, 1000)
    assert with_backward(shape, forward) == replace(forward.scaled(2), attention=3 * forward.attention)
