"""Optimizer state on a GPU: streamed from the host as it is updated on the device, and offloaded."""

from __future__ import annotations

import pytest
import torch

from fivefold.config.schema.megatron import MegatronOptimizerFields
from fivefold.engine.kernels.matmul import add_matmul
from fivefold.engine.kernels.rounding import GradientRounding, add_rounded, round_to, seed_of
from fivefold.engine.state import optimizer_state
from fivefold.engine.state.optimizer_state import STATE_KINDS, AdamStep, OptimizerState, Shard, StateFormat
from fivefold.engine.state.parkable import Parkable
from fivefold.engine.state.precision import join_master, split_master
from fivefold.engine.state.slices import state_slices

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SMALL = {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16", "store_param_remainders": True}
OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8}
SIZES = (1_000_003, 5, 64, 300_000, 77)


def make_shards(dtype: torch.dtype) -> list[Shard]:
    generator = torch.Generator().manual_seed(0)
    shards = []
    for index, size in enumerate(SIZES):
        parameter = torch.nn.Parameter(torch.randn(size, generator=generator).to("cuda", dtype))
        options = {**OPTIONS, "weight_decay": 0.1 * (index % 2)}
        shards.append(Shard(f"p{index}", parameter, 0, parameter.detach().view(-1), options))
    return shards


def trained(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, bucket_size: int, grad_dtype: torch.dtype, **fields: object
) -> tuple[list[torch.Tensor], OptimizerState, list[Shard]]:
    """Make five steps. Returns weights and state of all shards."""
    monkeypatch.setattr(optimizer_state, "BUCKET_SIZE", bucket_size)
    shards = make_shards(dtype)
    state = OptimizerState(shards, StateFormat.of(MegatronOptimizerFields(**fields), dtype))
    generator = torch.Generator("cuda").manual_seed(1)
    for update in range(1, 6):
        for shard in shards:
            size = shard.weight_N.numel()
            grad = torch.randn(size, generator=generator, device="cuda").to(grad_dtype)
            vars(shard.weight_N)["decoupled_grad"] = grad
        state.update(AdamStep(update, 0.5, decoupled=True))
    torch.cuda.synchronize()
    kept = [part.get(kind).clone() for part in state_slices(state) for kind in STATE_KINDS]
    return [*(shard.weight_N.clone() for shard in shards), *kept], state, shards


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fields", [{}, SMALL, {"exp_avg_dtype": "bfloat16"}], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_state_on_the_host_is_updated_as_on_the_device(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, fields: dict[str, object], grad_dtype: torch.dtype
) -> None:
    if dtype == torch.float32:
        fields = {key: value for key, value in fields.items() if key != "store_param_remainders"}
    wanted, _, _ = trained(monkeypatch, dtype, 2**25, grad_dtype, **fields)
    for bucket_size in (2**12, 2**18):
        got, state, _ = trained(monkeypatch, dtype, bucket_size, grad_dtype, **fields, state_on="host")
        assert all(tensor.is_pinned() for bucket in state.buckets for tensor in bucket.stored.values())
        assert [index for index, pair in enumerate(zip(wanted, got, strict=True)) if not torch.equal(*pair)] == []


def test_the_default_is_torchs_fused_adamw_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    got, _, _ = trained(monkeypatch, torch.float32, 2**25, torch.float32)
    parameters = [shard.parameter for shard in make_shards(torch.float32)]
    groups = [{"params": [p], "weight_decay": 0.1 * (i % 2)} for i, p in enumerate(parameters)]
    reference = torch.optim.AdamW(groups, **OPTIONS, fused=True)
    generator = torch.Generator("cuda").manual_seed(1)
    for _ in range(5):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.numel(), generator=generator, device="cuda") * 0.5
        reference.step()
    assert all(torch.equal(*pair) for pair in zip(got, parameters, strict=False))


def test_a_streaming_update_takes_three_buckets_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 2**20
    monkeypatch.setattr(optimizer_state, "BUCKET_SIZE", size)
    parameter = torch.nn.Parameter(torch.randn(40 * size, device="cuda").bfloat16())
    shard = Shard("p", parameter, 0, parameter.detach(), {**OPTIONS, "weight_decay": 0.0})
    state = OptimizerState([shard], StateFormat.of(MegatronOptimizerFields(**SMALL, state_on="host"), torch.bfloat16))
    vars(shard.weight_N)["decoupled_grad"] = torch.randn(40 * size, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    state.update(AdamStep(1, 1.0, decoupled=True))
    taken = torch.cuda.max_memory_allocated() - before
    # What the plan counts: three buckets of 6 bytes, and the bucket's master weights and moments in float32.
    assert 3 * 6 * size < taken <= (3 * 6 + 12) * size + 4096


def test_the_precision_functions_give_the_bits_of_the_cpu() -> None:
    powers = torch.arange(100_003) % 60 - 30
    values = torch.randn(100_003, generator=torch.Generator().manual_seed(2)) * 10.0**powers
    results = []
    for device in (torch.device("cpu"), torch.device("cuda")):
        x = values.to(device)
        weight, remainder = torch.empty_like(x, dtype=torch.bfloat16), torch.empty_like(x, dtype=torch.int16)
        split_master(x, weight, remainder)
        assert torch.equal(join_master(weight, remainder), x)
        rounded = [torch.empty_like(weight) for _ in range(4)]
        for number, out in enumerate(rounded):
            round_to(x, out, seed_of("w/3"), 12345 + 2**31 * (number // 2), number % 2)
        results.append([tensor.cpu() for tensor in (weight, remainder, *rounded)])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_sums_of_gradients_have_the_bits_of_the_cpu() -> None:
    generator = torch.Generator().manual_seed(3)
    total, values = torch.randn(100_003, generator=generator).bfloat16(), torch.randn(100_003, generator=generator)
    values[:2] = torch.tensor([torch.inf, -torch.inf])
    results = []
    for device in ("cpu", "cuda"):
        sums = total.to(device, copy=True)
        add_rounded(sums, values.to(device), seed_of("w/3"), start=2**32 - 1000)
        add_rounded(sums, values.bfloat16().to(device), seed_of("w/4"))
        results.append(sums.cpu())
    assert torch.equal(*results)


def test_a_dense_product_is_summed_in_float32_and_rounded_stochastically() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randn(*shape, generator=generator, device="cuda").bfloat16() for shape in ((9000, 70), (70, 64)))
    total = torch.zeros(9001, 64, dtype=torch.bfloat16, device="cuda")
    vars(total)["rounding"] = GradientRounding("w")
    mean, exact = torch.zeros(9000, 64, dtype=torch.float64, device="cuda"), a.double() @ b.double()
    for _ in range(64):
        total.zero_()
        add_matmul(total, a, b)
        mean += total[:9000].double() / 64
    off, off_on_average = (float((value - exact).norm() / exact.norm()) for value in (total[:9000].double(), mean))
    assert 1e-3 < off < 4e-3
    assert off_on_average < 0.2 * off
    assert not total[9000].any()


@pytest.mark.parametrize("keep_values", [True, False])
def test_parking_frees_the_memory_and_brings_the_values_back(keep_values: bool) -> None:
    tensor = torch.randn(3 * 2**25 + 1, device="cuda")
    view, copy, before = tensor[5:], tensor.clone(), torch.cuda.memory_allocated()
    parkable = Parkable(tensor)
    for _ in range(2):
        n_bytes = parkable.park(keep_values=keep_values)
        assert n_bytes == tensor.nbytes
        assert abs(before - torch.cuda.memory_allocated() - n_bytes) < 2**20
        assert parkable.park(keep_values=keep_values) == 0
        assert parkable.fetch(keep_values=keep_values) == n_bytes
        assert torch.equal(tensor, copy if keep_values else torch.zeros_like(copy))
        assert torch.equal(view, tensor[5:])


def test_offloaded_state_goes_on_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    got, state, shards = trained(monkeypatch, torch.bfloat16, 2**18, torch.float32, **SMALL)
    before = torch.cuda.memory_allocated()
    freed = state.park()
    assert freed == 6 * sum(bucket.size for bucket in state.buckets)
    assert before - torch.cuda.memory_allocated() >= freed
    with pytest.raises(ValueError, match="onload"):
        next(state_slices(state)).get("exp_avg")
    state.fetch()
    kept = [part.get(kind) for part in state_slices(state) for kind in STATE_KINDS]
    assert all(torch.equal(*pair) for pair in zip(got[len(shards) :], kept, strict=True))
