"""Optimizer state in every precision and in both places: the same updates wherever the format is exact."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compare import assert_close
from fsdp_cases import FSDPCase
from hf_reference import Tensors
from megatron_cases import Case, OpenEngine, whole
from ragged import uneven_batch
from safetensors.torch import load_file
from worker_pool import Workers

from fivefold.algorithms.supervised_losses import SFTLoss
from fivefold.config.schema.engine import FSDPConfig, OptimizerConfig
from fivefold.config.schema.megatron import MegatronConfig
from fivefold.engine.state import optimizer_state
from fivefold.fsdp import optimizer as fsdp_optimizer
from fivefold.mcore import compat
from fivefold.weights.stream import unstacked
from tests.rows import long

OPTIMIZER = OptimizerConfig(lr=1e-3, weight_decay=0.1, gradient_clipping=0.5)
SMALL = {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16", "store_param_remainders": True}


def case_of(layout: str, dtype: str = "bfloat16", **fields: Any) -> Case:
    return Case(layout, MegatronConfig(optimizer=fields), dtype=dtype)


def on_fsdp(layout: str, **fields: Any) -> FSDPCase:
    return FSDPCase(layout, FSDPConfig(optimizer=fields), dtype="bfloat16")


def masters(engine: OpenEngine) -> list[torch.Tensor]:
    return [part.get("param").clone() for part in engine.optimizer.slices()]


def gathered(value: Any) -> list[Any]:
    """Return the value of each rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def train(engine: OpenEngine, n_steps: int) -> None:
    for _ in range(n_steps):
        engine.forward_backward_of(uneven_batch(), SFTLoss())
        assert not engine.optim_step().skipped


def weights_after(case: Case, folder: Path, n_steps: int, bucket_size: int) -> tuple[Tensors, list[torch.Tensor], int]:
    """In a worker: train. Returns the weights, this rank's state and the number of its buckets."""
    optimizer_state.BUCKET_SIZE = bucket_size
    try:
        engine = case.engine(folder, OPTIMIZER)
    finally:
        optimizer_state.BUCKET_SIZE = 2**25
    train(engine, n_steps)
    state = [part.get(kind).clone() for part in engine.optimizer.slices() for kind in optimizer_state.STATE_KINDS]
    return whole(engine.export_weights()), state, len(engine.optimizer.state.buckets)


@pytest.mark.parametrize(
    ("layout", "dtype", "fields"),
    [
        ("megatron:(attn:d2t2|ffn:t2e2)", "bfloat16", SMALL),
        ("megatron:d1", "bfloat16", {}),
        ("megatron:d2e2", "float32", {}),
        ("megatron:d2e2", "bfloat16", {"store_param_remainders": True, "decoupled_weight_decay": False}),
        *long(
            *((layout, "bfloat16", SMALL) for layout in ("megatron:d1", "megatron:d2e2", "megatron:p2v2")),
            ("megatron:d2e2", "bfloat16", {"exp_avg_dtype": "bfloat16"}),
        ),
    ],
)
def test_state_on_the_host_in_many_buckets_is_updated_as_on_the_device(
    workers: Workers, models: Path, layout: str, dtype: str, fields: dict[str, Any]
) -> None:
    run, model = workers(Case(layout).world_size), models / "qwen3_moe"
    wanted = run.run(weights_after, case_of(layout, dtype, **fields), model, 2, 2**25)
    got = run.run(weights_after, case_of(layout, dtype, **fields, state_on="host"), model, 2, 1024)
    for (weights, state, n_buckets), (host_weights, host_state, n_host_buckets) in zip(wanted, got, strict=True):
        assert n_buckets == 1
        assert n_host_buckets > 5
        assert [name for name in weights if not torch.equal(weights[name], host_weights[name])] == []
        assert all(torch.equal(*pair) for pair in zip(state, host_state, strict=True))


def compare_with_torch(case: Case, folder: Path, config: OptimizerConfig) -> list[bool]:
    """In a worker: whether the master weights equal those of torch's AdamW after each of three steps."""
    engine = case.engine(folder, config)
    parts, copies = list(engine.optimizer.slices()), [torch.nn.Parameter(master) for master in masters(engine)]
    exempt = [part.parameter.ndim == 1 for part in parts]
    groups = [
        {"params": [c for c, e in zip(copies, exempt, strict=True) if e is flag], "weight_decay": decay}
        for flag, decay in ((False, config.weight_decay), (True, 0.0))
    ]
    reference = torch.optim.AdamW(
        groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True, foreach=False
    )
    equal = []
    for _ in range(3):
        engine.forward_backward_of(uneven_batch(), SFTLoss())
        for part, copy in zip(parts, copies, strict=True):
            copy.grad = part.parameter.main_grad.view(-1)[part.start : part.end].clone()
        norm = engine.optim_step().grad_norm
        if config.gradient_clipping and norm > config.gradient_clipping:
            for copy in copies:
                copy.grad *= config.gradient_clipping / (norm + 1e-6)
        reference.step()
        equal.append(all(torch.equal(*pair) for pair in zip(masters(engine), copies, strict=True)))
    return equal


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        *(("megatron:p2v2", "float32"), ("megatron:d2e2", "bfloat16")),
        *long(*((layout, "bfloat16") for layout in ("megatron:d1", "megatron:(attn:d2t2|ffn:t2e2)", "megatron:p2v2"))),
    ],
)
def test_the_default_is_torchs_adamw_bit_for_bit(workers: Workers, models: Path, layout: str, dtype: str) -> None:
    case = case_of(layout, dtype)
    for equal in workers(case.world_size).run(compare_with_torch, case, models / "qwen3_moe", OPTIMIZER):
        assert equal == [True] * 3


def masters_after_a_step(case: Case, folder: Path) -> list[torch.Tensor]:
    """In a worker: return this rank's master weights after one step."""
    engine = case.engine(folder, OPTIMIZER)
    train(engine, 1)
    return masters(engine)


@pytest.mark.parametrize("layout", ["megatron:d2e2", *long("megatron:d1", "megatron:(attn:d2t2|ffn:t2e2)")])
def test_master_weights_from_remainders_are_the_float32_ones(workers: Workers, models: Path, layout: str) -> None:
    """After one step, because a weight that is rounded otherwise at a tie changes the gradients of the next."""
    model, run = models / "qwen3_moe-bf16", workers(Case(layout).world_size)
    wanted = run.run(masters_after_a_step, case_of(layout), model)
    got = run.run(masters_after_a_step, case_of(layout, store_param_remainders=True), model)
    for wanted_masters, got_masters in zip(wanted, got, strict=True):
        assert all(torch.equal(*pair) for pair in zip(wanted_masters, got_masters, strict=True))


def exported_masters(case: Case, folder: Path) -> Tensors:
    """In a worker: return the first master weights under Hugging Face names, of a layout without data parallelism."""
    engine = case.engine(folder, OPTIMIZER)
    whole_masters = {
        part.name: part.get("param").view(part.parameter.shape)
        for part in engine.optimizer.slices()
        if part.end - part.start == part.parameter.numel()
    }
    return whole(unstacked(engine._bridge.export(whole_masters, engine._shards)))


@pytest.mark.parametrize(
    ("layout", "remainders"), [("megatron:d1", True), ("megatron:(attn:t2|ffn:e2)", False), ("megatron:p2", False)]
)
def test_master_weights_have_all_digits_of_the_files(
    workers: Workers, models: Path, layout: str, remainders: bool
) -> None:
    """The model's own weights are bfloat16, and its files float32."""
    case = case_of(layout, store_param_remainders=remainders)
    masters = workers(case.world_size).run(exported_masters, case, models / "qwen2_moe")[0]
    stored = load_file(models / "qwen2_moe" / "model.safetensors")
    assert stored.keys() == masters.keys()
    assert all(torch.equal(masters[name], tensor) for name, tensor in stored.items())


def stored_dtypes(case: Case, folder: Path) -> set[tuple[str, torch.dtype]]:
    """In a worker: return kind and dtype of the tensors of state."""
    engine = case.engine(folder, OPTIMIZER)
    return {(kind, tensor.dtype) for bucket in engine.optimizer.state.buckets for kind, tensor in bucket.stored.items()}


def test_each_kind_of_state_is_stored_in_its_own_precision(workers: Workers, models: Path) -> None:
    def stored(dtype: str = "bfloat16", **fields: Any) -> dict[str, torch.dtype]:
        return dict(workers(1).run(stored_dtypes, case_of("megatron:d1", dtype, **fields), models / "qwen3_moe")[0])

    f32, bf16 = torch.float32, torch.bfloat16
    assert stored() == {"param": f32, "exp_avg": f32, "exp_avg_sq": f32}
    assert stored("float32") == {"exp_avg": f32, "exp_avg_sq": f32}
    assert stored(exp_avg_dtype="bfloat16") == {"param": f32, "exp_avg": bf16, "exp_avg_sq": f32}
    assert stored(exp_avg_sq_dtype="bfloat16") == {"param": f32, "exp_avg": f32, "exp_avg_sq": bf16}
    assert stored(**SMALL) == {"param": torch.int16, "exp_avg": bf16, "exp_avg_sq": bf16}


def copies_agree(case: Case, folder: Path, names: tuple[str, ...]) -> bool:
    """In a worker: train, and return whether all ranks that hold one of the named parameters have the same bits."""
    engine = case.engine(folder, OPTIMIZER)
    train(engine, 3)
    tensors = engine.parameters.tensors.items()
    own = [p.detach().view(torch.int16) for n, p in tensors if any(part in n for part in names)]
    held = [tensors for tensors in gathered(own) if tensors]
    assert len(held) > 1, "several ranks must hold the parameter"
    return all(torch.equal(*pair) for other in held[1:] for pair in zip(held[0], other, strict=True))


@pytest.mark.parametrize(
    ("layout", "model", "names"),
    [
        ("megatron:t2", "qwen3_moe", ("layernorm", "router")),
        ("megatron:d2", "qwen3", ("linear",)),
        ("megatron:p2", "qwen2", ("word_embeddings", "output_layer")),
    ],
)
def test_copies_of_a_parameter_on_several_ranks_are_rounded_alike(
    workers: Workers, models: Path, layout: str, model: str, names: tuple[str, ...]
) -> None:
    assert all(workers(2).run(copies_agree, case_of(layout, **SMALL), models / model, names))


def gradients_and_norm(case: Case, folder: Path) -> tuple[Tensors, float, set[torch.dtype]]:
    """In a worker: return the gradient of a batch, its norm, and the dtypes of its buffers."""
    engine = case.engine(folder, OPTIMIZER)
    engine.forward_backward_of(uneven_batch(), SFTLoss())
    found = whole(engine.gradients())
    dtypes = {vars(each.tensor)["main_grad"].dtype for each in engine.parameters.with_gradient}
    return {name: tensor.float() for name, tensor in found.items()}, engine.optim_step().grad_norm, dtypes


@pytest.mark.parametrize("layout", ["megatron:d2e2", *long("megatron:d1", "megatron:(attn:t2p2|ffn:e2)")])
def test_gradients_in_bfloat16_are_those_of_float32_but_for_rounding(
    workers: Workers, models: Path, layout: str
) -> None:
    model, run = models / "qwen3_moe", workers(Case(layout).world_size)
    wanted, norm, dtypes = run.run(gradients_and_norm, case_of(layout), model)[0]
    assert dtypes == {torch.float32}
    rounded = Case(layout, MegatronConfig(ddp={"grad_reduce_in_fp32": False}), dtype="bfloat16")
    got, rounded_norm, dtypes = run.run(gradients_and_norm, rounded, model)[0]
    assert dtypes == {torch.bfloat16}
    assert_close(got, wanted, 0.05)
    assert rounded_norm == pytest.approx(norm, rel=0.01)


def rounded_gradients(case: Case, folder: Path, steps: list[int]) -> list[Tensors]:
    """In a worker: the gradient of one batch of several micro-batches, as it is rounded at each of these steps."""
    engine = case.engine(folder, OPTIMIZER)
    found = []
    for step in steps:
        engine.optimizer.steps = step
        engine.forward_backward_of(uneven_batch(), SFTLoss())
        found.append(whole(engine.gradients()))
        engine.optimizer.zero_grad()
        engine.offload({"grads"})
        engine.onload({"grads"})
    return found


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ("megatron:d1", "qwen3_moe_mixed"),
        *long(("megatron:(attn:t2|ffn:e2)", "qwen3_moe"), ("megatron:p2v2", "qwen3_moe_mixed")),
    ],
)
def test_sums_of_gradients_in_bfloat16_are_right_on_average(
    workers: Workers, models: Path, layout: str, model: str
) -> None:
    """The mean over the steps comes near the gradient that is summed in float32; one step has the same bits twice."""
    run = workers(Case(layout).world_size)
    form = MegatronConfig(ddp={"grad_reduce_in_fp32": False})
    exact = run.run(rounded_gradients, case_of(layout), models / model, [0])[0][0]
    *rounded, again = run.run(rounded_gradients, Case(layout, form, dtype="bfloat16"), models / model, [*range(24), 0])[
        0
    ]
    assert all(torch.equal(rounded[0][name], again[name]) for name in exact)
    assert any(not torch.equal(rounded[0][name], rounded[1][name]) for name in exact)
    # The sum over ranks is rounded to the nearest, once.
    reduced = () if layout == "megatron:d1" else ("norm.weight", "mlp.gate.weight", "embed_tokens.weight")
    for name, wanted in exact.items():
        if not name.endswith(reduced):
            sums = torch.stack([step[name].double() for step in rounded])
            off, off_on_average = ((values - wanted).norm() for values in (sums[0], sums.mean(0)))
            assert 0 < float(off_on_average) <= 0.45 * float(off), name


def test_moments_on_fsdp_are_stored_and_streamed_as_the_recipe_says(workers: Workers, models: Path) -> None:
    run, model = workers(2), models / "qwen3_moe"
    small = on_fsdp("fsdp:d2", exp_avg_dtype="bfloat16", exp_avg_sq_dtype="bfloat16")
    assert run.run(stored_dtypes, small, model)[0] == {(kind, torch.bfloat16) for kind in ("exp_avg", "exp_avg_sq")}
    for case in (on_fsdp("fsdp:d2"), small):
        wanted = run.run(weights_after, case, model, 2, 2**25)
        streamed = run.run(weights_after_streaming, case, model, 2, 1024)
        for (weights, state, _), (host_weights, host_state, n_buckets) in zip(wanted, streamed, strict=True):
            assert n_buckets > 5
            assert all(torch.equal(weights[name], host_weights[name]) for name in weights)
            assert all(torch.equal(*pair) for pair in zip(state, host_state, strict=True))


def weights_after_streaming(
    case: FSDPCase, folder: Path, n_steps: int, bucket_size: int
) -> tuple[Tensors, list[torch.Tensor], int]:
    """In a worker: `weights_after`, with state on the host, which a CPU process would not tell from its own memory."""
    compat.prepare()
    device_format = fsdp_optimizer.state_format
    fsdp_optimizer.state_format = lambda fields, device: replace(device_format(fields, device), on_host=True)
    try:
        return weights_after(case, folder, n_steps, bucket_size)
    finally:
        fsdp_optimizer.state_format = device_format


@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
def test_training_with_small_state_goes_the_way_of_float32_state(workers: Workers, models: Path, engine: str) -> None:
    run, model = workers(1), models / "qwen3_moe"
    on_engine = on_fsdp if engine == "fsdp" else case_of
    fewer = {key: value for key, value in SMALL.items() if engine == "megatron" or key != "store_param_remainders"}
    start, wanted, got = (
        run.run(weights_after, on_engine(f"{engine}:d1", **fields), model, n, 2**25)[0][0]
        for fields, n in (({}, 0), ({}, 12), (fewer, 12))
    )
    names = list(start)
    before, full, small = (torch.cat([w[name].float().flatten() for name in names]) for w in (start, wanted, got))
    assert (small - full).norm() < 0.2 * (full - before).norm()
