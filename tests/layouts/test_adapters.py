"""Low-rank adapters train as plain autograd trains W + scale B A in Hugging Face's model, on every layout."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import AnyCase, case_of
from compare import assert_close, difference
from fsdp_cases import FSDPCase, OpenFSDPEngine
from hf_reference import Step, Tensors, load_model, predict
from megatron_cases import Case, OpenEngine, whole
from ragged import uneven_batch
from safetensors.torch import load_file
from test_checkpoint import assert_equal, commit, read_with_torch
from test_exported_weights import language_model
from worker_pool import Workers

from fivefold.algorithms.supervised_losses import SFTLoss
from fivefold.algorithms.value_loss import ValueLoss
from fivefold.bridge.adapters import WithAdapters
from fivefold.bridge.hf_reader import HFWeights
from fivefold.config.schema.engine import FSDPConfig, OptimizerConfig
from fivefold.config.schema.megatron import MegatronConfig
from fivefold.families.adapters import JOINT, MATRICES, AdapterShape, adapter_name
from fivefold.families.family import Family
from fivefold.families.read import load_shape
from fivefold.families.registry import find_family
from fivefold.families.tensors import VALUE_BIAS, VALUE_WEIGHT, tensors
from fivefold.fsdp.shards import local_elements
from tests.rows import long

ALL_LAYERS = AdapterShape(rank=3, expert_rank=2, alpha=6.0)
SHARED = replace(ALL_LAYERS, shares_outer=True)
OPTIMIZER = OptimizerConfig(lr=5e-3, eps=1e-3, weight_decay=0.1, gradient_clipping=1.0)
N_STEPS = 2
FULL = MegatronConfig(recompute="full")


@dataclass(frozen=True)
class Result:
    steps: list[Step]
    weights: Tensors
    """The merged weights."""
    without: torch.Tensor
    """Log-probs without the adapters after the steps."""
    n_buffered: int
    """Elements of this rank's gradient buffers."""


def merged(base: Tensors, adapters: Tensors, shape: AdapterShape) -> Tensors:
    found = each_expert(base)
    for name in found:
        # Experts that share a matrix have one without their number in its name.
        a, b = (
            adapters.get(adapter_name(name, matrix), adapters.get(adapter_name(without_number(name), matrix)))
            for matrix in MATRICES
        )
        if a is not None and b is not None:
            found[name] = found[name] + shape.scale(len(a)) * b @ a
    return {name: found[name] if name in found else together(found, name, len(base[name])) for name in base}


def each_expert(tensors: Tensors) -> Tensors:
    """Return tensors with the matrices of joint experts [E, in, out] apart, as [out, in]."""
    found = {}
    for name, tensor in tensors.items():
        path, _, kind = name.rpartition(".")
        if tensor.ndim == 3 and kind in JOINT:
            found |= {f"{path}.{e}.{kind}": each.T for e, each in enumerate(tensor)}
        else:
            found[name] = tensor
    return found


def together(apart: Tensors, name: str, n_experts: int) -> torch.Tensor:
    path, _, kind = name.rpartition(".")
    return torch.stack([apart[f"{path}.{e}.{kind}"].T for e in range(n_experts)])


def without_number(name: str) -> str:
    return re.sub(r"experts\.\d+", "experts", name)


def as_in_memory(model: Any, files: Tensors, family: Family) -> Tensors:
    """Return the tensors of files as the parameters of a model, which keeps experts in stacks."""
    found, files = {}, {family.in_memory(name): tensor for name, tensor in files.items()}
    for name, parameter in model.named_parameters():
        if name in files:
            found[name] = files[name]
            continue
        prefix, kind = name.rsplit(".", 1)
        experts = range(len(parameter))
        if kind == "gate_up_proj":
            pairs = [[files[f"{prefix}.{e}.{part}_proj.weight"] for part in ("gate", "up")] for e in experts]
            found[name] = torch.stack([torch.cat(pair) for pair in pairs])
        else:
            found[name] = torch.stack([files[f"{prefix}.{e}.{kind}.weight"] for e in experts])
    return found


def hf_train(folder: Path, shape: AdapterShape) -> tuple[list[Step], Tensors, Tensors]:
    """In a worker: return the steps, the adapters, and the merged weights after them."""
    model, base, batch = load_model(folder), language_model(folder), uneven_batch()
    family = find_family(load_shape(folder).family)
    files = HFWeights(folder)
    drawn = WithAdapters(files, replace(load_shape(folder), adapters=shape), seed=1)
    adapters = {name: drawn.read(name).requires_grad_() for name in drawn.names - files.names}
    optimizer = torch.optim.AdamW(
        adapters.values(),
        lr=OPTIMIZER.lr,
        weight_decay=0.1,
        eps=OPTIMIZER.eps,
        betas=(OPTIMIZER.beta1, OPTIMIZER.beta2),
    )
    steps = []
    for _ in range(N_STEPS):
        optimizer.zero_grad()
        own = as_in_memory(model, merged(base, adapters, shape), family)
        total = 0.0
        for index in range(len(batch)):
            row = batch.select([index])
            predicted = torch.func.functional_call(
                Predicts(model), {f"model.{name}": value for name, value in own.items()}, (row.tokens_T,)
            )
            cost = -(predicted * row.mask_T).sum() / batch.mask_T.sum()
            cost.backward(retain_graph=True)
            total += float(cost)
        norm = torch.nn.utils.clip_grad_norm_(adapters.values(), OPTIMIZER.gradient_clipping)
        optimizer.step()
        steps.append(Step(total, float(norm)))
    after = {name: each.detach() for name, each in adapters.items()}
    return steps, after, merged(base, after, shape)


class Predicts(torch.nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens_L: torch.Tensor) -> torch.Tensor:
        return predict(self.model, tokens_L, 1.0)[0]


def train(case: AnyCase, folder: Path, shape: AdapterShape, state: Path) -> Result:
    """In a worker: make steps, and save after all of them."""
    engine, steps, n_buffered = case.engine(folder, OPTIMIZER, adapters=shape), [], 0
    for _ in range(N_STEPS):
        metrics = engine.forward_backward_of(uneven_batch(), SFTLoss())
        n_buffered = buffered_elements(engine)
        steps.append(Step(metrics["loss"], engine.optim_step().grad_norm))
    commit(engine.snapshot(state), state)
    with engine.without_adapters():
        without, _ = engine.logprobs_of(uneven_batch(), temperature=1.0)
    engine.save_hf(state.parent / "saved")
    engine.save_adapters(state.parent / "saved" / "adapter")
    return Result(steps, whole(engine.export_weights()), without, n_buffered)


def buffered_elements(engine: OpenEngine | OpenFSDPEngine) -> int:
    """Return the elements of this rank's gradients."""
    if isinstance(engine, OpenEngine):
        return sum(buffer.grad_data.numel() for buffer in engine._buffers.buffers)
    grads = [shard.tensor.grad for shard in engine.shards]
    return sum(local_elements(grad).numel() for grad in grads if grad is not None)


def resume(case: AnyCase, folder: Path, shape: AdapterShape, state: Path) -> Tensors:
    """In a worker: load the state after all steps, offload twice and bring back."""
    engine = case.engine(folder, OPTIMIZER, adapters=shape)
    engine.load(state)
    parked = []
    for _ in range(2):
        freed = engine.offload()
        if isinstance(engine, OpenEngine):
            parked.append(whole(engine.export_weights()))
        assert freed == engine.onload() > 0
    weights = whole(engine.export_weights())
    for each in parked:
        assert_equal(each, weights)
    return weights


def merged_weights(case: AnyCase, folder: Path, shape: AdapterShape) -> Tensors:
    return whole(case.engine(folder, adapters=shape).export_weights())


def base_logprobs(case: AnyCase, folder: Path) -> torch.Tensor:
    return case.engine(folder).logprobs_of(uneven_batch(), temperature=1.0)[0]


SELECTIVE = MegatronConfig(recompute="selective")
CASES: list[tuple[str, AnyCase, AdapterShape]] = [
    ("qwen3_moe", Case("megatron:c2", SELECTIVE), ALL_LAYERS),
    ("qwen3_moe", Case("megatron:(attn:d2|ffn:t2)"), ALL_LAYERS),
    ("qwen3_moe", Case("megatron:(attn:p2t2|ffn:p2e2)"), ALL_LAYERS),
    ("deepseek_v2", Case("megatron:t2"), ALL_LAYERS),
    ("qwen3_next", Case("megatron:(attn:t2|ffn:e2)", SELECTIVE), ALL_LAYERS),
    ("qwen3_moe", FSDPCase("fsdp:d2t2", FSDPConfig(recompute="full", reshard_after_forward=False)), ALL_LAYERS),
    ("qwen3_moe", Case("megatron:d2e2", FULL), SHARED),
    ("qwen3_moe", FSDPCase("fsdp:d1"), SHARED),
    ("gpt_oss", Case("megatron:(attn:d2|ffn:t2)"), ALL_LAYERS),
]
FURTHER: list[tuple[str, AnyCase, AdapterShape]] = [
    ("qwen2_moe", Case("megatron:t2e2"), ALL_LAYERS),
    ("gpt_oss", FSDPCase("fsdp:t2"), ALL_LAYERS),
    ("qwen3_5_moe", FSDPCase("fsdp:c2"), ALL_LAYERS),
    ("qwen3_moe", Case("megatron:(attn:d2|ffn:t2)"), SHARED),
    ("qwen3_moe", Case("megatron:d1"), ALL_LAYERS),
    ("qwen3_moe", Case("megatron:d2"), ALL_LAYERS),
    ("qwen3_moe", Case("megatron:t2"), ALL_LAYERS),
    ("qwen3_moe", Case("megatron:p2", FULL), ALL_LAYERS),
    ("qwen2", Case("megatron:t2"), ALL_LAYERS),
    ("deepseek_v2", Case("megatron:t2c2"), ALL_LAYERS),
    ("deepseek_v2", Case("megatron:d1"), ALL_LAYERS),
    ("qwen3_next", Case("megatron:d1", FULL), ALL_LAYERS),
    ("qwen3_5", Case("megatron:t2"), ALL_LAYERS),
    ("qwen3_5", Case("megatron:c2"), ALL_LAYERS),
    ("qwen3_5_moe", Case("megatron:(attn:p2t2|ffn:p2e2)"), ALL_LAYERS),
    ("qwen3_next", FSDPCase("fsdp:d2t2"), ALL_LAYERS),
    ("qwen3_5", FSDPCase("fsdp:t2", FSDPConfig(recompute="full")), ALL_LAYERS),
    ("qwen3_moe", FSDPCase("fsdp:d1"), ALL_LAYERS),
    ("qwen3_moe", FSDPCase("fsdp:d2", FSDPConfig(recompute="full")), ALL_LAYERS),
    ("qwen3_moe", FSDPCase("fsdp:t2"), ALL_LAYERS),
    ("qwen3_moe", FSDPCase("fsdp:c2"), ALL_LAYERS),
    ("qwen2", FSDPCase("fsdp:t2"), ALL_LAYERS),
    ("qwen2", FSDPCase("fsdp:d2"), ALL_LAYERS),
    ("qwen2_moe", FSDPCase("fsdp:t2"), ALL_LAYERS),
    ("deepseek_v2", FSDPCase("fsdp:t2"), ALL_LAYERS),
    ("deepseek_v2", FSDPCase("fsdp:c2"), ALL_LAYERS),
    ("qwen3_moe", Case("megatron:d1"), SHARED),
    ("gpt_oss", Case("megatron:d1", FULL), ALL_LAYERS),
    ("gpt_oss", Case("megatron:(attn:p2t2|ffn:p2e2)", SELECTIVE), ALL_LAYERS),
    ("gpt_oss", Case("megatron:(attn:d2|ffn:t2)"), SHARED),
    ("gpt_oss", FSDPCase("fsdp:d2", FSDPConfig(recompute="full")), SHARED),
    ("qwen3_moe", Case("megatron:(attn:p2t2|ffn:p2e2)"), SHARED),
    ("qwen3_moe", Case("megatron:(attn:t2c2|ffn:t2e2)", SELECTIVE), SHARED),
    ("qwen2_moe", Case("megatron:t2e2"), SHARED),
    ("qwen3_moe", FSDPCase("fsdp:d2t2", FSDPConfig(recompute="full")), SHARED),
]


@pytest.fixture(scope="module")
def by_autograd(workers: Workers, models: Path) -> Callable[[str, AdapterShape], tuple[list[Step], Tensors, Tensors]]:
    """Returns what `hf_train` makes of a model with adapters."""
    return cache(lambda model, shape: workers(1).run(hf_train, models / model, shape)[0])


@pytest.mark.parametrize(
    ("model", "case", "shape"),
    [*CASES, *long(*FURTHER)],
    ids=[f"{model} {case.layout}{' shared' * shape.shares_outer}" for model, case, shape in (*CASES, *FURTHER)],
)
def test_adapters_train_as_in_plain_autograd(
    workers: Workers,
    models: Path,
    by_autograd: Callable[[str, AdapterShape], tuple[list[Step], Tensors, Tensors]],
    tmp_path: Path,
    model: str,
    case: AnyCase,
    shape: AdapterShape,
) -> None:
    folder = models / model
    steps, adapters, wanted = by_autograd(model, shape)
    results = workers(case.world_size).run(train, case, folder, shape, tmp_path / "state")
    before = language_model(folder)
    for ours, theirs in zip(results[0].steps, steps, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-3)
    weights = results[0].weights
    assert weights.keys() == before.keys()
    assert_close(difference(weights, before), difference(wanted, before), 5e-3)
    [state, *moments] = read_with_torch(tmp_path / "state").values()
    assert state.keys() == adapters.keys() == moments[0].keys()
    assert any(".experts.gate" in name for name in adapters) == shape.shares_outer
    assert_close(state, adapters, 5e-3)
    assert_equal(language_model(tmp_path / "saved"), weights)
    in_file = load_file(tmp_path / "saved" / "adapter" / "adapter_model.safetensors")
    in_file = {name.removeprefix("base_model.model."): each for name, each in in_file.items()}
    one_scale = shape.scale(2 if any(".experts." in name for name in in_file) else 3)
    by_file = {
        name: weight + one_scale * in_file[adapter_name(name, "B")] @ in_file[adapter_name(name, "A")]
        for name, weight in each_expert(before).items()
        if adapter_name(name, "A") in in_file
    }
    assert len(by_file) == len(in_file) // 2
    after = each_expert(weights)
    assert_close(by_file, {name: after[name] for name in by_file}, 1e-5)
    again = replace(shape, path=str(tmp_path / "saved" / "adapter"))
    (continued, *_) = workers(case.world_size).run(merged_weights, case, folder, again)
    assert_close(continued, weights, 1e-6)
    resumed = workers(case.world_size).run(resume, case, folder, shape, tmp_path / "state")
    assert_equal(resumed[0], weights)
    plain = workers(case.world_size).run(base_logprobs, case, folder)
    assert torch.equal(results[0].without, plain[0]), "without adapters it is the model that it began with"
    whole_model = sum(tensor.numel() for tensor in before.values())
    assert 0 < results[0].n_buffered < whole_model, "the frozen weights have no gradient buffer"


def peft_logprobs(folder: Path, saved: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """In a worker: return the log-probs of the base with the adapters by PEFT, and of the merged model."""
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    # The names in Qwen3.5's files are of the model that also reads images.
    reads_images = load_shape(folder).family.startswith("qwen3_5")
    base = AutoModelForImageTextToText.from_pretrained(folder) if reads_images else load_model(folder)
    adapted = PeftModel.from_pretrained(base, saved / "adapter")
    batch = uneven_batch()
    with torch.no_grad():
        found = [
            torch.cat([predict(model, tokens_L, 1.0)[0] for tokens_L in batch.split(batch.tokens_T)])
            for model in (adapted, load_model(saved))
        ]
    return found[0], found[1]


@pytest.mark.parametrize(
    ("model", "adapters"),
    [
        ("qwen3", replace(ALL_LAYERS, rank_stabilized=True)),
        ("qwen3_next", replace(ALL_LAYERS, targets=("in_proj_*", "out_proj", "[qkvo]_proj"))),
        ("qwen3_5", ALL_LAYERS),
        ("qwen3_moe", ALL_LAYERS),
        ("qwen3_moe", SHARED),
        *long(
            ("qwen2", replace(ALL_LAYERS, targets=("q_proj", "o_proj", "up_proj"))),
            ("qwen3_moe_mixed", replace(ALL_LAYERS, targets=("[qkvo]_proj",))),
            ("qwen3_moe", replace(ALL_LAYERS, expert_rank=3)),
        ),
    ],
)
def test_peft_loads_the_adapters(
    workers: Workers, models: Path, tmp_path: Path, model: str, adapters: AdapterShape
) -> None:
    pytest.importorskip("peft")
    workers(1).run(train, Case("megatron:d1"), models / model, adapters, tmp_path / "state")
    ((with_peft, merged_),) = workers(1).run(peft_logprobs, models / model, tmp_path / "saved")
    assert_close({"": with_peft}, {"": merged_}, 1e-5)
    assert not torch.equal(merged_, workers(1).run(base_logprobs, Case("megatron:d1"), models / model)[0])


@pytest.mark.parametrize("layout", ["megatron:t2", *long("fsdp:t2")])
def test_some_layers_alone_have_adapters(workers: Workers, models: Path, tmp_path: Path, layout: str) -> None:
    folder, some = models / "qwen3_moe", replace(ALL_LAYERS, targets=("k_proj", "up_proj"))
    ((steps, _, wanted),) = workers(1).run(hf_train, folder, some)
    result, *_ = workers(2).run(train, case_of(layout), folder, some, tmp_path / "state")
    before = load_file(folder / "model.safetensors")
    for ours, theirs in zip(result.steps, steps, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-3)
    assert_close(difference(result.weights, before), difference(wanted, before), 5e-3)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("bfloat16", ALL_LAYERS), *long(("float32", ALL_LAYERS), ("float32", SHARED))],
    ids=["bfloat16", "float32", "shared"],
)
@pytest.mark.parametrize(("first", "second"), [("megatron:t2", "fsdp:d2"), *long(("fsdp:t2", "megatron:d2"))])
def test_a_run_resumes_on_the_other_engine(
    workers: Workers, models: Path, tmp_path: Path, first: str, second: str, dtype: str, shape: AdapterShape
) -> None:
    folder, state = models / "qwen3_moe", tmp_path / "state"
    result, *_ = workers(2).run(train, case_of(first, dtype=dtype), folder, shape, state)
    resumed, *_ = workers(2).run(resume, case_of(second, dtype=dtype), folder, shape, state)
    # The engines merge in products of other shapes, which may sum in another order.
    assert_close(resumed, result.weights, torch.finfo(getattr(torch, dtype)).eps)


def train_critic(case: AnyCase, folder: Path) -> tuple[list[Step], Tensors]:
    """In a worker: make steps of a critic, whose head begins at 0."""
    engine, steps = case.engine(folder, OPTIMIZER, value_head=True, adapters=ALL_LAYERS), []
    batch = uneven_batch()
    generator = torch.Generator().manual_seed(5)
    values, returns = (torch.randn(batch.n_tokens, generator=generator) for _ in range(2))
    batch = batch.with_fields(values=values, returns=returns)
    for _ in range(N_STEPS):
        metrics = engine.forward_backward_of(batch, ValueLoss(1e6, "token_mean"))
        steps.append(Step(metrics["loss"], engine.optim_step().grad_norm))
    return steps, whole(engine.export_weights())


def test_a_critic_trains_its_adapters_and_its_head_alike_on_both_engines(workers: Workers, models: Path) -> None:
    folder = models / "qwen3_moe"
    steps, weights = workers(1).run(train_critic, Case("megatron:d1"), folder)[0]
    others, same = workers(2).run(train_critic, FSDPCase("fsdp:t2"), folder)[0]
    for ours, theirs in zip(others, steps, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-3)
    heads = {VALUE_WEIGHT: torch.zeros(1), VALUE_BIAS: torch.zeros(1)}
    files = load_file(folder / "model.safetensors")
    before = heads | {name: files[name] for name in weights.keys() - heads.keys()}
    assert_close(difference(same, before), difference(weights, before), 5e-3)
    assert weights[VALUE_BIAS] != 0


def test_the_adapters_of_a_model_are_the_layers_that_are_named(models: Path) -> None:
    shape = load_shape(models / "qwen3_moe")
    for adapters, layers in (
        (replace(ALL_LAYERS, expert_rank=None), {"q_proj", "k_proj", "v_proj", "o_proj"}),
        (replace(ALL_LAYERS, targets=("[qv]_proj",)), {"q_proj", "v_proj"}),
        (replace(ALL_LAYERS, targets=("down_proj",)), {"down_proj"}),
    ):
        found = [tensor for tensor in tensors(replace(shape, adapters=adapters)) if tensor.adapts]
        assert {tensor.name.split(".")[-3] for tensor in found} == layers
        assert len(found) == 2 * len(layers) * shape.n_layers


def test_different_matrices_of_experts_are_not_shared(workers: Workers, models: Path, tmp_path: Path) -> None:
    folder = models / "qwen3_moe"
    workers(1).run(train, Case("megatron:d1"), folder, ALL_LAYERS, tmp_path / "state")
    adapters = replace(SHARED, path=str(tmp_path / "saved" / "adapter"))
    source = WithAdapters(HFWeights(folder), replace(load_shape(folder), adapters=adapters), seed=1)
    with pytest.raises(ValueError, match=r"different matrices .*experts\.0\.gate_proj.* and .*experts\.1\.gate_proj"):
        source.read("model.layers.0.mlp.experts.gate_proj.lora_A.weight")


def test_a_folder_of_other_adapters_is_refused(workers: Workers, models: Path, tmp_path: Path) -> None:
    folder, some = models / "qwen3", replace(ALL_LAYERS, targets=("q_proj",))
    workers(1).run(train, Case("megatron:d1"), folder, some, tmp_path / "state")
    path, source = str(tmp_path / "saved" / "adapter"), HFWeights(folder)
    for changes, message in (
        ({"rank": 4}, r"lora_A\.weight it has \[3, 32\], and the recipe \[4, 32\]: set lora\.rank"),
        ({"targets": ("k_proj",)}, "k_proj.* it has none"),
        ({"path": str(tmp_path)}, "adapter_config.json"),
    ):
        shape = replace(load_shape(folder), adapters=replace(some, **{"path": path, **changes}))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=message):
            WithAdapters(source, shape, seed=1)
