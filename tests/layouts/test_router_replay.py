"""Routes that are recorded and replayed: on every layout, tokens go to the given experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import hf_reference
import pytest
import torch
from cases import AnyCase
from compare import assert_close
from fsdp_cases import FSDPCase
from hf_reference import Tensors
from megatron_cases import Case, whole
from ragged import uneven_batch
from worker_pool import Workers

from fivefold.algorithms.supervised_losses import SFTLoss
from fivefold.batch import Batch
from fivefold.config.schema.engine import FSDPConfig, OptimizerConfig
from fivefold.config.schema.megatron import MegatronConfig
from fivefold.engine.scores import Logprobs
from fivefold.families.read import load_shape
from fivefold.types import ROUTES, UNKNOWN_EXPERT
from tests.rows import long

TOLERANCE = 1e-4
N_EXPERTS = 8
EVERY = (
    "mixtral",
    "minimax_m2",
    "gpt_oss",
    "qwen2_moe",
    "qwen3_moe_mixed",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "glm4_moe_lite",
)
FULL, SELECTIVE = (MegatronConfig(recompute=way) for way in ("full", "selective"))
SOME_LAYERS = MegatronConfig(recompute="full", transformer={"recompute_method": "block", "recompute_num_layers": 1})
MOE_ALONE = MegatronConfig(recompute="selective", transformer={"recompute_modules": ["moe"]})
CASES: list[tuple[AnyCase, str]] = [
    *((Case("megatron:d1"), model) for model in ("gpt_oss", "qwen2_moe", "deepseek_v3")),
    *long(*((Case("megatron:d1"), model) for model in EVERY if model not in ("gpt_oss", "qwen2_moe", "deepseek_v3"))),
    *((Case("megatron:d1", recomputed), "qwen3_moe_mixed") for recomputed in (FULL, SELECTIVE, SOME_LAYERS, MOE_ALONE)),
    (Case("megatron:p2v2", FULL), "qwen3_moe_mixed"),
    (Case("megatron:(attn:t2|ffn:e2)"), "deepseek_v3"),
    (Case("megatron:(attn:c2|ffn:t2)"), "qwen2_moe"),
    *long((Case("megatron:(attn:p2t2c2|ffn:e4)"), "qwen3_moe")),
    *long((Case("megatron:(attn:c2d2|ffn:t2e2)", FULL), "deepseek_v2")),
    *((FSDPCase("fsdp:d1"), model) for model in ("mixtral", "minimax_m2", "glm4_moe", "glm4_moe_lite")),
    *long(*((FSDPCase("fsdp:d1"), model) for model in ("gpt_oss", "qwen2_moe", "qwen3_moe_mixed", "deepseek_v2"))),
    *long((FSDPCase("fsdp:d1"), "deepseek_v3")),
    (FSDPCase("fsdp:d2", FSDPConfig(recompute="full")), "qwen3_moe_mixed"),
    (FSDPCase("fsdp:c2t2"), "deepseek_v3"),
    (Case("megatron:d1"), "deepseek_v32"),
    (FSDPCase("fsdp:d1"), "glm_moe_dsa"),
]


def routed_batch(folder: Path) -> Batch:
    """Return `uneven_batch`, for two thirds of whose tokens experts are given that no router would choose."""
    batch, shape = uneven_batch(), load_shape(folder)
    generator = torch.Generator().manual_seed(3)
    n = batch.n_tokens * shape.n_moe_layers
    # Experts of one group: DeepSeek-V2's router gives those of other groups a weight of 0.
    size = N_EXPERTS // shape.expert_groups if shape.groups_per_token == 1 else N_EXPERTS
    first = torch.randint(0, N_EXPERTS // size, (n, 1), generator=generator) * size
    chosen = first + torch.rand(n, size, generator=generator).argsort(1)[:, : shape.top_k]
    routes_TLK = chosen.view(batch.n_tokens, shape.n_moe_layers, shape.top_k).to(torch.int8)
    routes_TLK[torch.rand(batch.n_tokens, generator=generator) < 1 / 3] = UNKNOWN_EXPERT
    return batch.with_fields(**{ROUTES: routes_TLK})


# Hugging Face's model, whose own routers compute the weights of what `torch.topk` seems to choose


@contextmanager
def choosing(given_TK: torch.Tensor, n_groups: int) -> Iterator[None]:
    """Inside the block, the experts of tokens are those that are given, and so is the group of them."""
    topk, known_T1 = torch.topk, given_TK[:, :1] >= 0

    def chosen(scores_TX: torch.Tensor, k: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        own = topk(scores_TX, k, **options).indices
        given = given_TK
        if scores_TX.shape[1] == n_groups:
            given = (given_TK[:, :1] // (N_EXPERTS // n_groups)).expand(-1, k)
            if k > 1:
                return topk(scores_TX, k, **options)
        indices = torch.where(known_T1, given, own)
        return scores_TX.gather(1, indices), indices

    with mock.patch.object(torch, "topk", chosen):
        yield


def gates_of(model: Any) -> list[Any]:
    """Return the routers of a model, under either name."""
    layers = [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    return [mlp.gate if hasattr(mlp, "gate") else mlp.router for mlp in layers]


def expected(folder: Path, batch: Batch, scratch: Path) -> tuple[torch.Tensor, Tensors]:
    """In a worker: return log-probs and the gradient of Hugging Face's model, whose tokens go where they should."""
    model, shape = hf_reference.load_model(folder), load_shape(folder)
    gates = gates_of(model)
    forwards = [gate.forward for gate in gates]
    total, rows = 0.0, []
    for index in range(len(batch)):
        sequence = batch.select([index])
        for row, (gate, forward) in enumerate(zip(gates, forwards, strict=True)):
            given_TK = sequence.fields[ROUTES][:, row].long()

            def replay(*inputs: torch.Tensor, given_TK: torch.Tensor = given_TK, forward: Any = forward) -> Any:
                with choosing(given_TK, shape.expert_groups):
                    return forward(*inputs)

            gate.forward = replay
        logprobs_T, _ = hf_reference.predict(model, sequence.tokens_T, 1.0)
        cost = hf_reference.sft_cost(logprobs_T, sequence) / float(batch.mask_T.sum())
        cost.backward()
        total += float(cost)
        rows.append(logprobs_T.detach())
    return torch.cat(rows), hf_reference.gradients_as_in_files(model, scratch)


def own_routes(folder: Path, batch: Batch) -> torch.Tensor:
    """In a worker: return the experts that Hugging Face's routers choose, sorted, int64 [T, MoE layers, top_k]."""
    model = hf_reference.load_model(folder)
    seen: list[torch.Tensor] = []
    for gate in gates_of(model):
        gate.register_forward_hook(lambda _module, _args, output: seen.append(output[2]))
    rows = []
    with torch.no_grad():
        for tokens in batch.split(batch.tokens_T):
            seen.clear()
            model(tokens[None])
            rows.append(torch.stack(seen, 1))
    return torch.cat(rows).sort(-1).values


# Engines


@dataclass(frozen=True)
class Replayed:
    logprobs_T: torch.Tensor
    gradients: Tensors
    metrics: dict[str, float]


def replay(case: AnyCase, folder: Path, batch: Batch) -> Replayed:
    """In a worker: compute log-probs and the gradient, twice, for a gradient that is accumulated."""
    engine = case.engine(folder, OptimizerConfig(), replays=True)
    logprobs_T, _ = engine.logprobs_of(batch, temperature=1.0)
    metrics = engine.forward_backward_of(batch, SFTLoss())
    return Replayed(logprobs_T, whole(engine.gradients()), metrics)


def record(case: AnyCase, folder: Path, batch: Batch) -> tuple[torch.Tensor, Tensors, dict[str, float]]:
    """In a worker: return the routes of this replica's tokens in their places, and the gradient that replays them."""
    engine = case.engine(folder, OptimizerConfig(), replays=True)
    share = engine.share(batch)
    routes_TLK = engine.score(share, Logprobs(records_routes=True))[ROUTES].int()
    mine = engine.planner.plan(batch.lengths).sequences(engine.groups.dp.rank())
    placed = torch.zeros(batch.n_tokens, *routes_TLK.shape[1:], dtype=torch.int32)
    starts, place = batch.offsets(), 0
    for index in mine:
        length = batch.lengths[index]
        placed[starts[index] : starts[index + 1]] = routes_TLK[place : place + length]
        place += length
    torch.distributed.all_reduce(placed, group=engine.groups.dp)
    metrics = engine.forward_backward_of(batch.with_fields(**{ROUTES: placed.to(torch.int8)}), SFTLoss())
    return placed.long().sort(-1).values, whole(engine.gradients()), metrics


@pytest.fixture(scope="module")
def of_hugging_face(
    workers: Workers, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[torch.Tensor, Tensors]]:
    scratch = tmp_path_factory.mktemp("gradients")
    return cache(lambda name: workers(1).run(expected, models / name, routed_batch(models / name), scratch / name)[0])


@pytest.mark.parametrize(("case", "model"), CASES, ids=lambda value: getattr(value, "layout", value))
def test_tokens_go_to_the_given_experts(
    workers: Workers,
    models: Path,
    of_hugging_face: Callable[[str], tuple[torch.Tensor, Tensors]],
    case: AnyCase,
    model: str,
) -> None:
    batch = routed_batch(models / model)
    want_logprobs, want_gradients = of_hugging_face(model)
    results = workers(case.world_size).run(replay, case, models / model, batch)
    for result in results:
        torch.testing.assert_close(result.logprobs_T, want_logprobs * batch.mask_T, rtol=TOLERANCE, atol=TOLERANCE)
    assert_close(results[0].gradients, want_gradients, TOLERANCE)
    assert 0.3 < results[0].metrics["replay/differs"] < 1.0, "random experts are few routers' own choice"


RECORDED: list[AnyCase] = [
    Case("megatron:(attn:c2d2|ffn:t2e2)"),
    Case("megatron:p2v2", FULL),
    FSDPCase("fsdp:c2t2"),
    *long(Case("megatron:d1"), Case("megatron:(attn:p2t2c2|ffn:e4)", FULL), FSDPCase("fsdp:d2")),
]


@pytest.mark.parametrize("case", RECORDED, ids=lambda case: case.layout)
def test_recorded_routes_are_the_routers_own(
    workers: Workers, models: Path, reference: Callable[[str], hf_reference.Reference], case: AnyCase
) -> None:
    folder, batch = models / "qwen3_moe_mixed", uneven_batch()
    (want,) = workers(1).run(own_routes, folder, batch)
    results = workers(case.world_size).run(record, case, folder, batch)
    assert all(torch.equal(routes, want) for routes, _, _ in results)
    assert_close(results[0][1], reference("qwen3_moe_mixed")[3], TOLERANCE)
    assert results[0][2]["replay/differs"] == 0.0
