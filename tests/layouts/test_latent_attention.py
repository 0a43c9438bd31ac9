"""Multi-head latent attention: unlike heads become alike for flash attention; memory and traffic are as planned."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from fsdp_cases import FSDPCase
from kept_bytes import flash, kept_bytes
from megatron_cases import Case
from ragged import uneven_batch
from worker_pool import Workers

from fivefold.algorithms.supervised_losses import SFTLoss
from fivefold.batch import Batch
from fivefold.config.schema.engine import FlashAttention, OptimizerConfig
from fivefold.config.schema.megatron import MegatronConfig, MegatronTransformerFields
from fivefold.engine.kernels import flash as flash_attention
from fivefold.engine.kernels.elementwise import cos_sin
from fivefold.engine.kernels.varlen import plan_attention, varlen_attention
from fivefold.engine.rope import inverse_frequencies
from fivefold.engine.sequences import localize
from fivefold.families.read import load_shape
from fivefold.layout.parser import parse_backend
from fivefold.mcore.engine import MegatronEngine
from fivefold.mcore.latent_attention import LatentSelfAttention
from fivefold.mcore.layers import PackedSequences
from fivefold.planning.activations import layer_costs
from fivefold.planning.groups import from_node_start, ranks_together
from fivefold.planning.stages import stages
from fivefold.planning.traffic import step_traffic
from fivefold.planning.workload import Workload
from tests.rows import long

LENGTH, HIDDEN = 64, 32
CPU = torch.device("cpu")


@pytest.mark.parametrize(("width", "value_width", "scale"), [(6, 4, 0.3), (6, 4, None), (4, 6, None), (4, 4, 0.5)])
def test_heads_of_unlike_widths_attend_as_a_softmax_says(width: int, value_width: int, scale: float | None) -> None:
    generator = torch.Generator().manual_seed(width)
    query, key, value = (torch.randn(9, 2, size, generator=generator) for size in (width, width, value_width))
    scores_HTT = torch.einsum("qhd,khd->hqk", query, key) * (scale or 1 / math.sqrt(width))
    weights_HTT = scores_HTT.masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    wanted = torch.einsum("hqk,khd->qhd", weights_HTT, value)
    kernels: tuple[FlashAttention | None, ...] = ("flash_attention_2", None)
    with patch.object(flash_attention, "_pytorch", lambda: flash):
        for one in kernels:
            plan = plan_attention([(9, 9)], flash=one, device=CPU)
            torch.testing.assert_close(varlen_attention(query, key, value, plan, scale), wanted)


def attention_of(
    engine: MegatronEngine, *, flash: FlashAttention | None
) -> tuple[LatentSelfAttention, torch.Tensor, PackedSequences]:
    """Return a layer's attention, and what it gets of one sequence on this rank."""
    cp = engine.groups.cp
    batch = Batch((LENGTH,), torch.zeros(LENGTH, dtype=torch.int64), torch.ones(LENGTH))
    local = localize(batch, cp_rank=cp.rank(), cp_size=cp.size(), total=LENGTH, flash=flash, device=CPU)
    frequencies = inverse_frequencies(engine.shape, CPU)
    cos_T1D, sin_T1D = cos_sin(local.positions_T, frequencies, torch.bfloat16, engine.shape.rope_scaling)
    packed = PackedSequences(qkv_format="thd", attention=local.attention, cos_T1D=cos_T1D, sin_T1D=sin_T1D)
    n_tokens = LENGTH // (cp.size() * engine.groups.tp.size())
    hidden = torch.randn(n_tokens, 1, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    return engine.modules_of(LatentSelfAttention)[0], hidden, packed


def saved_bytes(case: Case, folder: Path) -> int:
    """In a worker: return the bytes that a layer's attention keeps for its backward pass, weights apart."""
    # Trained, because frozen weights need less of it.
    return kept_bytes(*attention_of(case.engine(folder, OptimizerConfig()), flash="flash_attention_2"))


RECOMPUTING = MegatronConfig(
    recompute="selective", transformer=MegatronTransformerFields(recompute_modules=["core_attn"])
)


@pytest.mark.parametrize("megatron", [MegatronConfig(), RECOMPUTING], ids=["saved", "recomputed"])
@pytest.mark.parametrize("model", ["deepseek_v3", "deepseek_v2"])
@pytest.mark.parametrize("layout", ["megatron:d1", "megatron:t2", "megatron:c2", *long("megatron:t2c2")])
def test_attention_keeps_what_is_planned(
    workers: Workers, models: Path, layout: str, model: str, megatron: MegatronConfig
) -> None:
    case, shape, parsed = Case(layout, megatron, dtype="bfloat16"), load_shape(models / model), parse_backend(layout)
    found = workers(case.world_size).run(saved_bytes, case, models / f"{model}-bf16")
    costs = layer_costs(shape, parsed, Workload(LENGTH, 1, LENGTH), is_moe=False)
    # Besides, the plan counts the residual stream, its norm (the input here) and two norms' float32 statistics.
    statistics = 2 * LENGTH // (parsed.cp * parsed.tp) * 4
    again = costs.core_attention if megatron is RECOMPUTING else 0
    assert sum(found) / len(found) == costs.attention - again - 2 * costs.input - statistics


@contextmanager
def noting(cp: dist.ProcessGroup) -> Iterator[list[float]]:
    """Yield a list of the bytes that each exchange of keys, or of their gradients, sends in the block."""
    sent: list[float] = []

    def noted(collective: Callable[..., Any], whole: int) -> Callable[..., Any]:
        def call(*tensors: torch.Tensor, group: dist.ProcessGroup, **options: Any) -> Any:
            if group is cp:
                sent.append(tensors[whole].nbytes * (cp.size() - 1) / cp.size())
            return collective(*tensors, group=group, **options)

        return call

    with (
        patch.object(dist, "all_gather_into_tensor", noted(dist.all_gather_into_tensor, 0)),
        patch.object(dist, "reduce_scatter_tensor", noted(dist.reduce_scatter_tensor, 1)),
    ):
        yield sent


def exchanged_bytes(case: Case, folder: Path) -> float:
    """In a worker: return the bytes that a layer's attention sends to context-parallel ranks, forward and backward."""
    engine = case.engine(folder)
    module, hidden, packed = attention_of(engine, flash=None)
    for parameter in module.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    with noting(engine.groups.cp) as sent:
        output, _ = module(hidden, packed_seq_params=packed)
        torch.autograd.grad(output.float().square().sum(), hidden)
    return sum(sent)


def exchanged_by_fsdp(case: FSDPCase, folder: Path) -> float:
    """In a worker: return the bytes that attention sends to context-parallel ranks, in both passes of all layers."""
    engine = case.engine(folder, OptimizerConfig())
    with noting(engine.groups.cp) as sent:
        engine.forward_backward_of(uneven_batch(lengths=(LENGTH,)), SFTLoss())
    return sum(sent)


@pytest.mark.parametrize("layout", ["megatron:c2", *long("megatron:t2c2")])
def test_context_parallel_ranks_exchange_latents_alone(workers: Workers, models: Path, layout: str) -> None:
    case, shape, parsed = Case(layout, dtype="bfloat16"), load_shape(models / "deepseek_v3"), parse_backend(layout)
    assert shape.latent is not None
    found = workers(case.world_size).run(exchanged_bytes, case, models / "deepseek_v3-bf16")
    # The rank's tokens once forward, and their gradients once backward, 2 bytes for each of 12 + 4 channels.
    assert found == [2 * LENGTH // 2 * 2 * (12 + 4)] * case.world_size
    work, together = Workload(LENGTH, 1, LENGTH), ranks_together(from_node_start(parsed, 8), is_moe=True)
    planned = step_traffic(parsed, shape, work, stages(parsed, shape)[0], together)
    assert [each.bytes for each in planned if each.dimension == "cp"] == [shape.n_layers * found[0]]


def test_context_parallel_ranks_of_fsdp_exchange_latents_alone(workers: Workers, models: Path) -> None:
    # Its sharded weights travel in other groups.
    found = workers(4).run(exchanged_by_fsdp, FSDPCase("fsdp:t2c2"), models / "deepseek_v3")
    assert found == [4 * 2 * LENGTH // 2 * 4 * (12 + 4)] * 4
