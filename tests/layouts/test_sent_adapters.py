"""Adapters that travel alone become the weights that the trainer would have sent, in every engine that takes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import AnyCase, case_of
from compare import assert_close
from fsdp_cases import FSDPCase, OpenFSDPEngine
from hf_reference import Tensors, load_model, predict
from megatron_cases import Case, OpenEngine, whole
from ragged import uneven_batch
from safetensors.torch import load_file
from test_adapters import ALL_LAYERS, FULL, OPTIMIZER, SHARED
from worker_pool import Workers

from fivefold.algorithms.supervised_losses import SFTLoss
from fivefold.batch import Batch
from fivefold.config.schema.rollout import GenerationConfig
from fivefold.families.adapters import AdapterShape
from fivefold.rollout.hf_model import build_model
from fivefold.rollout.protocol import GenerationRequest, SamplingParams
from fivefold.rollout.receiving import receiver_of
from fivefold.rollout.transformers_engine import TransformersEngine
from fivefold.types import Completion
from fivefold.weights.adapter import AdapterMemory
from fivefold.weights.buckets import Bucket
from fivefold.weights.transport import Route
from tests.rows import long

READERS = frozenset({0})


def transport_of(shape: AdapterShape, dtype: str = "float32") -> AdapterMemory:
    return AdapterMemory(merged_dtype=dtype, alpha=shape.alpha, rank_stabilized=shape.rank_stabilized)


def trained(case: AnyCase, folder: Path, shape: AdapterShape) -> OpenEngine | OpenFSDPEngine:
    engine = case.engine(folder, OPTIMIZER, adapters=shape)
    for _ in range(3):
        engine.forward_backward_of(uneven_batch(), SFTLoss())
        engine.optim_step()
    return engine


def send(case: AnyCase, folder: Path, shape: AdapterShape) -> tuple[list[Bucket], Tensors]:
    """In a worker: make steps; return what is sent of the adapters, and the merged weights."""
    engine = trained(case, folder, shape)
    if isinstance(engine, OpenEngine):
        engine.offload()
    route = Route(transport_of(shape, case.dtype), case.dtype, checksum=True, readers=READERS)
    sender = route.transport.sender(route, torch.distributed.get_rank(), 60.0)
    sent = list(sender.items(engine.export_adapters(READERS)))
    if isinstance(engine, OpenEngine):
        engine.onload()
    return sent, whole(engine.export_weights())


def received(
    shape: AdapterShape, folder: Path, sent: list[Bucket], dtype: str = "float32"
) -> Iterator[tuple[str, torch.Tensor]]:
    return receiver_of(transport_of(shape, dtype), str(folder))(iter(sent), torch.device("cpu"))


def changed(weights: Tensors, before: Tensors) -> set[str]:
    return {name for name, weight in weights.items() if not torch.equal(weight, before[name].to(weight))}


CASES: list[tuple[str, AnyCase, AdapterShape]] = [
    ("qwen3_moe", Case("megatron:d1", dtype="bfloat16"), ALL_LAYERS),
    ("qwen3_moe", Case("megatron:(attn:p2t2|ffn:p2e2)", FULL), ALL_LAYERS),
    ("deepseek_v2", Case("megatron:t2"), replace(ALL_LAYERS, rank_stabilized=True)),
    ("qwen3_moe", FSDPCase("fsdp:d2"), SHARED),
    ("qwen2", FSDPCase("fsdp:t2"), replace(ALL_LAYERS, targets=("q_proj", "down_proj"))),
]
FURTHER: list[tuple[str, AnyCase, AdapterShape]] = [
    ("qwen2_moe", Case("megatron:t2e2"), replace(ALL_LAYERS, rank_stabilized=True)),
    ("qwen3_moe", Case("megatron:(attn:d2|ffn:t2)"), SHARED),
    ("qwen3_moe", Case("megatron:d1"), ALL_LAYERS),
    ("qwen3_5_moe", Case("megatron:(attn:t2|ffn:e2)"), ALL_LAYERS),
    ("qwen3_moe", FSDPCase("fsdp:d2t2"), ALL_LAYERS),
]


@pytest.mark.parametrize(
    ("model", "case", "shape"),
    [*CASES, *long(*FURTHER)],
    ids=[f"{model} {case.layout} {case.dtype}" for model, case, _ in (*CASES, *FURTHER)],
)
def test_a_replica_merges_what_the_trainer_merges(
    workers: Workers, models: Path, model: str, case: AnyCase, shape: AdapterShape
) -> None:
    folder = models / model
    (sent, weights), *others = workers(case.world_size).run(send, case, folder, shape)
    assert not any(each for each, *_ in others), "one rank sends"
    found = dict(received(shape, folder, sent, case.dtype))
    assert {name: tensor.dtype for name, tensor in found.items()} == {n: t.dtype for n, t in weights.items()}
    # Products of other shapes may sum in another order.
    assert_close(found, weights, torch.finfo(getattr(torch, case.dtype)).eps)
    before = load_file(folder / "model.safetensors")
    assert changed(found, before) == changed(weights, before)
    n_sent = sum(bucket.data.nbytes for bucket in sent)
    assert 0 < n_sent < sum(tensor.nbytes for tensor in weights.values())


def logprobs_after_steps(case: AnyCase, folder: Path, shape: AdapterShape, batch: Batch) -> torch.Tensor:
    """In a worker: make the same steps, and score other sequences."""
    engine = trained(case, folder, shape)
    return engine.logprobs_of(batch, temperature=1.0)[0]


def completions_of(folder: Path, shape: AdapterShape, sent: list[Bucket]) -> tuple[Batch, torch.Tensor, torch.Tensor]:
    """Return what the embedded engine samples with the adapters, and its log-probs with them and without."""
    model, _ = build_model(str(folder), dtype=torch.float32, device=torch.device("cpu"), load_weights=False)
    receiver = receiver_of(transport_of(shape), str(folder))
    engine = TransformersEngine(model, None, end_token_ids=(), max_batch_size=8, weight_version=None, receiver=receiver)
    engine.receive(iter(sent), 1)
    prompts = [tokens_L[:5].tolist() for tokens_L in uneven_batch().split(uneven_batch().tokens_T) if len(tokens_L) > 5]
    sampling = SamplingParams.from_config(GenerationConfig(max_new_tokens=7))
    for number, prompt in enumerate(prompts):
        engine.submit(number, GenerationRequest(tuple(prompt), seed=number), sampling)
    done = dict[int, Completion]()
    while len(done) < len(prompts):
        done |= dict(engine.collect(1.0))
    rows = [torch.tensor([*prompt, *done[n].token_ids.tolist()]) for n, prompt in enumerate(prompts)]
    masks = [torch.tensor([0.0] * 5 + [1.0] * 7)] * len(rows)
    base = load_model(folder)
    with torch.no_grad():
        without = torch.cat([predict(base, row, 1.0)[0] for row in rows])
    batch = Batch(tuple(map(len, rows)), torch.cat(rows), torch.cat(masks))
    return batch, torch.cat([torch.from_numpy(done[n].logprobs) for n in range(len(rows))]), without


@pytest.mark.parametrize("layout", ["megatron:d2e2", "fsdp:d1"])
def test_the_engines_log_probs_move_as_the_trainers_do_where_experts_alone_have_adapters(
    workers: Workers, models: Path, layout: str
) -> None:
    shape = replace(ALL_LAYERS, targets=("gate_proj", "up_proj", "down_proj"))
    case, folder = case_of(layout), models / "qwen3_moe"
    (sent, _), *_ = workers(case.world_size).run(send, case, folder, shape)
    batch, engines_N, without_T = completions_of(folder, shape, sent)
    trainers_T, *_ = workers(case.world_size).run(logprobs_after_steps, case, folder, shape, batch)
    sampled = batch.mask_T.bool()
    assert torch.allclose(engines_N, trainers_T[sampled], atol=1e-5)
    assert (engines_N - without_T[sampled]).abs().mean() > 1e-3, "the adapters of experts change log-probs"


def test_adapters_of_another_model_are_refused(workers: Workers, models: Path) -> None:
    (sent, _), *_ = workers(1).run(send, Case("megatron:d1"), models / "qwen3_moe", ALL_LAYERS)
    with pytest.raises(ValueError, match=r"the actor sent .*lora_A\.weight, an adapter for which .* has no layer"):
        list(received(ALL_LAYERS, models / "qwen3", sent))
