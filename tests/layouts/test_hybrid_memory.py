"""The memory of layers of hybrid models: attention with output gates, and gated delta nets, as planned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kept_bytes import kept_bytes
from megatron_cases import Case
from worker_pool import Workers

from fivefold.batch import Batch
from fivefold.config.schema.engine import OptimizerConfig
from fivefold.config.schema.megatron import MegatronConfig, MegatronTransformerFields
from fivefold.engine.kernels.elementwise import cos_sin
from fivefold.engine.rope import inverse_frequencies
from fivefold.engine.sequences import localize
from fivefold.families.read import load_shape
from fivefold.layout.parser import parse_backend
from fivefold.mcore.delta_net import GatedDeltaNet
from fivefold.mcore.layers import PackedSelfAttention, PackedSequences
from fivefold.planning.activations import layer_costs
from fivefold.planning.workload import Workload
from tests.rows import long

LENGTH, HIDDEN = 128, 32
CPU = torch.device("cpu")
RECOMPUTING = MegatronConfig(
    recompute="selective", transformer=MegatronTransformerFields(recompute_modules=["core_attn"])
)


def mixer_bytes(case: Case, folder: Path, is_delta: bool) -> int:
    """In a worker: return the bytes that a layer keeps of what mixes its tokens, weights apart."""
    engine = case.engine(folder, OptimizerConfig())
    cp, tp = engine.groups.cp, engine.groups.tp
    batch = Batch((LENGTH,), torch.zeros(LENGTH, dtype=torch.int64), torch.ones(LENGTH))
    local = localize(batch, cp_rank=cp.rank(), cp_size=cp.size(), total=LENGTH, flash="flash_attention_2", device=CPU)
    tables = cos_sin(local.positions_T, inverse_frequencies(engine.shape, CPU), torch.bfloat16, None)
    packed = PackedSequences(qkv_format="thd", attention=local.attention, cos_T1D=tables[0], sin_T1D=tables[1])
    n_tokens = LENGTH // (cp.size() * tp.size())
    hidden = torch.randn(n_tokens, 1, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    [module, *_] = engine.modules_of(GatedDeltaNet if is_delta else PackedSelfAttention)
    return kept_bytes(module, hidden, packed)


@pytest.mark.parametrize("megatron", [MegatronConfig(), RECOMPUTING], ids=["saved", "recomputed"])
@pytest.mark.parametrize("is_delta", [False, True], ids=["attention", "delta net"])
@pytest.mark.parametrize("layout", ["megatron:d1", "megatron:t2"])
def test_a_layer_keeps_what_is_planned(
    workers: Workers, models: Path, layout: str, is_delta: bool, megatron: MegatronConfig
) -> None:
    case, shape, parsed = (
        Case(layout, megatron, dtype="bfloat16"),
        load_shape(models / "qwen3_next"),
        parse_backend(layout),
    )
    found = workers(case.world_size).run(mixer_bytes, case, models / "qwen3_next-bf16", is_delta)
    costs = layer_costs(shape, parsed, Workload(LENGTH, 1, LENGTH), is_moe=True, is_delta=is_delta)
    # Besides, the plan counts the residual stream, its norm (the input here) and two norms' float32 statistics.
    statistics = 2 * LENGTH // (parsed.cp * parsed.tp) * 4
    again = costs.core_attention if megatron is RECOMPUTING else 0
    print("found", found, "planned", costs.attention - again - 2 * costs.input - statistics)
    assert sum(found) / len(found) == pytest.approx(costs.attention - again - 2 * costs.input - statistics, rel=0.05)


FAMILIES = ("gpt_oss", "gemma3_text", "minimax_m2", "mistral")


@pytest.mark.parametrize(
    ("model", "layout"),
    [*((model, "megatron:d1") for model in FAMILIES), *long(*((model, "megatron:t2") for model in FAMILIES))],
)
def test_attention_with_windows_sinks_biases_and_further_norms_keeps_what_is_planned(
    workers: Workers, models: Path, model: str, layout: str
) -> None:
    case, shape, parsed = Case(layout, dtype="bfloat16"), load_shape(models / model), parse_backend(layout)
    found = workers(case.world_size).run(mixer_bytes, case, models / f"{model}-bf16", False)
    costs = layer_costs(shape, parsed, Workload(LENGTH, 1, LENGTH), is_moe=shape.moe_layers[0])
    statistics = 2 * LENGTH // (parsed.cp * parsed.tp) * 4
    assert sum(found) / len(found) == pytest.approx(costs.attention - 2 * costs.input - statistics, rel=0.05)
