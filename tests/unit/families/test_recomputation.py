"""FLOPs that are computed again, against the forward pass counted by other means."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fivefold.config.schema.engine import EngineConfig
from fivefold.families.flops import ForwardFlops, PartFlops
from fivefold.families.read import find_shape
from fivefold.families.recomputation import repeated_shares
from fivefold.families.shape import ModelShape
from fivefold.layout.parallel import ParallelLayout

QWEN = find_shape("Qwen3-30B-A3B")
FORWARD = ForwardFlops.of(QWEN).on([1000, 24], 1024)
LAYERS = FORWARD.total - FORWARD.head


def repeated_flops(forward: PartFlops, config: EngineConfig, layout: ParallelLayout, shape: ModelShape) -> float:
    return forward.weighted(repeated_shares(config, layout, shape))


def pipeline(engine: str, pp: int = 1, cp: int = 1) -> ParallelLayout:
    return ParallelLayout(engine, tp=1, pp=pp, cp=cp, dp=1, vpp=1, ep=1, etp=1, edp=cp)


def repeated(engine: str = "megatron", pp: int = 1, **section: object) -> float:
    """Return the repeated FLOPs besides those of the logits, which are always computed twice."""
    config = EngineConfig.model_validate({"path": "model", engine: section})
    return repeated_flops(FORWARD, config, pipeline(engine, pp), QWEN) - FORWARD.head


def test_whole_layers_are_all_of_the_forward_pass_but_its_head() -> None:
    assert repeated() == 0
    assert repeated(recompute="full") == pytest.approx(LAYERS)
    assert repeated("fsdp", recompute="full") == pytest.approx(LAYERS)
    # 3 of the 12 layers of each of 4 stages.
    block = {"recompute_method": "block", "recompute_num_layers": 3}
    assert repeated(pp=4, recompute="full", transformer=block) == pytest.approx(LAYERS / 4)


def test_modules_are_their_own_matmuls() -> None:
    assert repeated(recompute="selective") == pytest.approx(FORWARD.experts + FORWARD.router)
    attention = {"recompute_modules": ["core_attn", "layernorm"]}
    assert repeated(recompute="selective", transformer=attention) == pytest.approx(FORWARD.attention)


def test_shared_experts_and_dense_mlps_are_told_apart() -> None:
    shape = replace(find_shape("DeepSeek-V3"), latent=None)
    forward = ForwardFlops.of(shape).on([100], 100)
    config = EngineConfig.model_validate(
        {
            "path": "model",
            "megatron": {"recompute": "selective", "transformer": {"recompute_modules": ["shared_experts"]}},
        }
    )
    shared = repeated_flops(forward, config, pipeline("megatron"), shape) - forward.head
    # 58 layers with a shared expert of 3 x 7168 x 2048 weights, 2 FLOPs for each weight and token.
    assert shared == pytest.approx(2 * 100 * 58 * 3 * 7168 * 2048)


def test_context_parallel_ranks_make_the_same_keys_of_latents() -> None:
    shape = find_shape("DeepSeek-V3")
    forward = ForwardFlops.of(shape).on([100], 100)

    def of(cp: int, **megatron: object) -> float:
        config = EngineConfig.model_validate({"path": "model", "megatron": megatron})
        return repeated_flops(forward, config, pipeline("megatron", cp=cp), shape) - forward.head

    # A latent of 512 channels becomes 128 channels of a key and 128 of a value for each of 128 heads.
    keys = 2 * 100 * 61 * 512 * 128 * (128 + 128)
    assert of(1) == 0
    # On 4 ranks, the queries of a rank see 9 of 8 chunks, of which 2 are its own.
    assert of(4) == pytest.approx(3 * 3.5 * keys)
    core = {"recompute": "selective", "transformer": {"recompute_modules": ["core_attn"]}}
    assert of(1, **core) == pytest.approx(forward.attention)
    assert of(4, **core) == pytest.approx(forward.attention + (3 * 3.5 + 4.5) * keys)
    assert of(4, recompute="full") - of(1, recompute="full") == pytest.approx(4 * 3.5 * keys)
    config = EngineConfig.model_validate({"path": "model", "fsdp": {"recompute": "full"}})
    on_fsdp = [repeated_flops(forward, config, pipeline("fsdp", cp=cp), shape) for cp in (1, 4)]
    assert on_fsdp[1] - on_fsdp[0] == pytest.approx(4 * 3.5 * keys)
