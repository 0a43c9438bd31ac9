"""Each Triton kernel against the plain function in float32 on the CPU, forward and backward, at odd sizes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from fivefold.engine.kernels import elementwise as kernels

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICE = torch.device("cuda")

from fivefold.engine.kernels import triton_experts, triton_heads, triton_logits  # noqa: E402 (Triton may be absent)

DTYPES = [torch.float32, torch.bfloat16]


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return random numbers on the device, which `dtype` holds exactly."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def reference(x: torch.Tensor | None) -> torch.Tensor | None:
    """Return the same values in float32 on the CPU, as a leaf."""
    return None if x is None else x.detach().cpu().float().requires_grad_(x.requires_grad)


def assert_close(results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
    """Assert that results equal the expected ones but for float32's error of the chain and one rounding to `dtype`."""
    for result, value in zip(results, expected, strict=True):
        assert result.dtype == dtype
        rtol = 0.51 * torch.finfo(dtype).eps + 1e-5
        torch.testing.assert_close(result.detach().cpu().float(), value.detach(), rtol=rtol, atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("prob_dtype", DTYPES)
@pytest.mark.parametrize(("n_rows", "width"), [(0, 16), (1, 1), (37, 24), (5, 768), (3, 1500), (2, 4099)])
def test_swiglu_equals_the_plain_function(n_rows: int, width: int, dtype: torch.dtype, prob_dtype: torch.dtype) -> None:
    gate_up = random(n_rows, 2 * width, seed=0, dtype=dtype).requires_grad_()
    probs = random(n_rows, seed=1).sigmoid().to(prob_dtype).requires_grad_()
    grad = random(n_rows, width, seed=2, dtype=dtype) / 16
    result = triton_experts.swiglu(gate_up, probs)
    result.backward(grad)
    gate_up_reference, probs_reference = reference(gate_up), reference(probs)
    expected = kernels.swiglu(gate_up_reference, probs_reference)
    expected.backward(reference(grad))
    assert_close([result, gate_up.grad], [expected, gate_up_reference.grad], dtype)
    assert_close([probs.grad], [probs_reference.grad], prob_dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("prob_dtype", DTYPES)
@pytest.mark.parametrize(("n_rows", "width"), [(0, 16), (1, 1), (37, 24), (5, 768), (2, 4099)])
def test_the_clamped_activation_equals_the_plain_function(
    n_rows: int, width: int, dtype: torch.dtype, prob_dtype: torch.dtype
) -> None:
    gate_up = (3 * random(n_rows, 2 * width, seed=0, dtype=dtype)).detach().requires_grad_()
    probs = random(n_rows, seed=1).sigmoid().to(prob_dtype).requires_grad_()
    grad = random(n_rows, width, seed=2, dtype=dtype) / 16
    result = kernels.clamped_swiglu(gate_up, probs, 2.0)
    result.backward(grad)
    gate_up_reference, probs_reference = reference(gate_up), reference(probs)
    expected = kernels.clamped_swiglu(gate_up_reference, probs_reference, 2.0)
    expected.backward(reference(grad))
    assert_close([result, gate_up.grad], [expected, gate_up_reference.grad], dtype)
    assert_close([probs.grad], [probs_reference.grad], prob_dtype)


def test_swiglu_takes_views() -> None:
    gate_up = random(16, 9, seed=0).t().requires_grad_()
    result = triton_experts.swiglu(gate_up, random(9, 2, seed=1)[:, 1])
    result.backward(torch.ones((), device=DEVICE).expand(9, 8))
    expected = reference(gate_up)
    kernels.swiglu(expected, reference(random(9, 2, seed=1)[:, 1])).sum().backward()
    assert_close([gate_up.grad], [expected.grad], torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("n_tokens", "terms", "width"), [(0, 2, 16), (1, 1, 1), (13, 8, 2048), (7, 3, 1001)])
def test_sum_rows_equals_the_plain_function(
    n_tokens: int, terms: int, width: int, dtype: torch.dtype, index_dtype: torch.dtype
) -> None:
    rows = random(n_tokens * terms + 1, width, seed=3, dtype=dtype)
    order = torch.randperm(n_tokens * terms, generator=torch.Generator().manual_seed(4))
    order[::3] = -1
    index = order.view(n_tokens, terms).to(DEVICE, index_dtype)
    result = triton_experts.sum_rows(rows, index)
    assert_close([result], [kernels.sum_rows(reference(rows), index.cpu())], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize(
    ("n_tokens", "n_groups", "n_queries", "head_dim"),
    [(1, 1, 1, 2), (21, 4, 8, 128), (9, 3, 1, 80), (5, 2, 7, 64), (3, 1, 30, 96)],
)
def test_split_heads_equals_the_plain_function(
    n_tokens: int, n_groups: int, n_queries: int, head_dim: int, has_norm: bool, dtype: torch.dtype
) -> None:
    inputs = [random(n_tokens, n_groups * (n_queries + 2) * head_dim, seed=7, dtype=dtype).requires_grad_()]
    if has_norm:
        inputs += [(1 + random(head_dim, seed=seed) / 4).to(dtype).requires_grad_() for seed in (8, 9)]
    weights = inputs[1:] or [None, None]
    cos, sin = (f(random(n_tokens, 1, head_dim, seed=10)).to(dtype) for f in (torch.cos, torch.sin))
    results = triton_heads.split_heads(inputs[0], *weights, cos, sin, n_groups, 1e-6)
    grads = [random(*result.shape, seed=11 + i, dtype=dtype) for i, result in enumerate(results)]
    torch.autograd.backward(results, grads)

    references = [reference(x) for x in inputs]
    weights = references[1:] or [None, None]
    turn = reference(cos), reference(sin)
    expected = kernels.split_heads(references[0], *weights, *turn, n_groups, 1e-6, head_dim)
    torch.autograd.backward(expected, [reference(grad) for grad in grads])
    assert_close(results, expected, dtype)
    assert_close([x.grad for x in inputs], [x.grad for x in references], dtype)


def test_split_heads_gives_the_same_bits_every_time() -> None:
    def weight_gradient() -> torch.Tensor:
        weight = torch.ones(128, device=DEVICE, requires_grad=True)
        cos, sin = random(300, 1, 128, seed=10), random(300, 1, 128, seed=11)
        query, key, _ = triton_heads.split_heads(random(300, 4 * 5 * 128, seed=7), weight, weight, cos, sin, 4, 1e-6)
        (query.square().sum() + key.pow(3).sum()).backward()
        return weight.grad

    assert torch.equal(weight_gradient(), weight_gradient())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n_rows", "vocab"), [(0, 8), (1, 1), (5, 1013), (3, 4096), (4, 9001)])
@pytest.mark.parametrize("offset", [0.0, -300.0, 3000.0])
def test_logit_statistics_equal_the_plain_function(n_rows: int, vocab: int, offset: float, dtype: torch.dtype) -> None:
    logits = (8 * random(n_rows, vocab, seed=12) + offset).to(dtype)
    targets = torch.arange(-1, n_rows - 1, device=DEVICE) * max(vocab // 3, 1)
    result = triton_logits.logit_statistics(logits, targets).cpu()
    expected = kernels.logit_statistics(reference(logits), targets.cpu())
    torch.testing.assert_close(result, expected, rtol=2e-5, atol=1e-5)


def test_a_logit_that_is_not_finite_affects_its_row_only() -> None:
    for value in (torch.nan, torch.inf):
        logits = random(3, 9001, seed=13)
        logits[1, 7000] = value
        total = triton_logits.logit_statistics(logits, torch.zeros(3, dtype=torch.int64, device=DEVICE))[1]
        assert total.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("has_entropy", [True, False])
@pytest.mark.parametrize(("n_rows", "vocab"), [(0, 8), (1, 1), (5, 1013), (3, 9001)])
def test_logit_gradient_equals_the_plain_function(
    n_rows: int, vocab: int, has_entropy: bool, dtype: torch.dtype, grad_dtype: torch.dtype
) -> None:
    logits = (4 * random(n_rows, vocab, seed=14)).to(dtype)
    targets = torch.arange(-1, n_rows - 1, device=DEVICE) * max(vocab // 3, 1)
    log_p = torch.log_softmax(logits.float(), dim=-1)
    log_normalizer = logits.float().logsumexp(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    grad_logprob, grad_entropy = random(n_rows, seed=15), random(n_rows, seed=16) if has_entropy else None
    arguments = (logits, targets, log_normalizer, grad_logprob, grad_entropy, entropy)
    result = triton_logits.logit_gradient(*arguments, grad_dtype)
    on_cpu = [None if x is None else x.cpu() for x in arguments]
    assert_close([result], [kernels.logit_gradient(*on_cpu, torch.float32)], grad_dtype)


def test_kernels_address_more_than_two_to_the_31_values() -> None:
    width = 2**20
    rows = torch.zeros(2049, width, dtype=torch.bfloat16, device=DEVICE)
    rows[-1] = 3.0
    assert triton_experts.sum_rows(rows, torch.tensor([[2048, 0]], device=DEVICE)).eq(3.0).all()
    last = triton_logits.logit_statistics(rows, torch.zeros(2049, dtype=torch.int64, device=DEVICE))[:, -1]
    assert last.tolist() == [3.0, width, 0.0, 3.0]


def test_tensors_on_a_gpu_go_to_the_triton_kernels() -> None:
    gate_up, probs = random(5, 16, seed=17, dtype=torch.bfloat16), random(5, seed=18).sigmoid()
    assert torch.equal(kernels.swiglu(gate_up, probs), triton_experts.swiglu(gate_up, probs))
