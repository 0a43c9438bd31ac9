"""The plain versions of the fused chains against naive formulas, which are differentiated by autograd."""

from __future__ import annotations

import math

import pytest
import torch

from fivefold.engine.kernels import elementwise as kernels


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_is_rounded_once(dtype: torch.dtype) -> None:
    gate_up, probs = random(5, 14, seed=0, dtype=dtype), random(5, seed=1).sigmoid()
    gate, up = gate_up.double()[:, :7], gate_up.double()[:, 7:]
    expected = gate / (1 + (-gate).exp()) * up * probs.double()[:, None]
    result = kernels.swiglu(gate_up, probs)
    assert result.dtype == dtype
    # A result that is rounded once is off by at most half a unit in the last place.
    torch.testing.assert_close(result.double(), expected, rtol=0.51 * torch.finfo(dtype).eps + 1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_clamped_activation_is_rounded_once(dtype: torch.dtype) -> None:
    gate_up, probs = 2 * random(5, 14, seed=0, dtype=dtype), random(5, seed=1).sigmoid()
    gate, up = (part.double() for part in gate_up.unflatten(1, (7, 2)).unbind(2))
    gate, up = torch.where(gate > 1.5, 1.5, gate), torch.where(up.abs() > 1.5, 1.5 * up.sign(), up)
    expected = (up + 1) * gate / (1 + (-1.702 * gate).exp()) * probs.double()[:, None]
    result = kernels.clamped_swiglu(gate_up, probs, 1.5)
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), expected, rtol=0.51 * torch.finfo(dtype).eps + 1e-6, atol=1e-7)


def test_sum_rows_accumulates_in_float32() -> None:
    # In bfloat16, 256 + 1 is 256: a sum in half precision would lose every 1.
    rows = torch.tensor([[256.0], [1.0], [1.0], [0.0]], dtype=torch.bfloat16)
    index = torch.tensor([[0, 1, 2], [3, 3, 1]])
    assert kernels.sum_rows(rows, index).tolist() == [[258.0], [1.0]]
    assert kernels.sum_rows(rows, torch.tensor([[0, -1, 2, 1], [-1, -1, -1, -1]])).tolist() == [[258.0], [0.0]]


@pytest.mark.parametrize(("n_groups", "n_queries", "head_dim"), [(1, 1, 2), (2, 3, 8), (3, 1, 6)])
@pytest.mark.parametrize("has_norm", [True, False])
def test_split_heads_rotates_each_pair_by_its_angle(
    n_groups: int, n_queries: int, head_dim: int, has_norm: bool
) -> None:
    n_tokens, half, eps = 4, head_dim // 2, 1e-3
    qkv = random(n_tokens, n_groups * (n_queries + 2) * head_dim, seed=3)
    weights = (random(head_dim, seed=4), random(head_dim, seed=5)) if has_norm else (None, None)
    angles = random(n_tokens, half, seed=6)
    cos, sin = (torch.cat((f(angles), f(angles)), dim=-1).unsqueeze(1) for f in (torch.cos, torch.sin))
    query, key, value = kernels.split_heads(qkv, *weights, cos, sin, n_groups, eps, head_dim)

    turn = torch.polar(torch.ones_like(angles), angles)
    for token in range(n_tokens):
        heads = iter(qkv[token].split(head_dim))
        for group in range(n_groups):
            outputs = [(query[token, group * n_queries + i], weights[0]) for i in range(n_queries)]
            for output, weight in [*outputs, (key[token, group], weights[1])]:
                head = next(heads)
                if weight is not None:
                    head = head / math.sqrt(float(head.square().mean()) + eps) * weight
                turned = torch.complex(head[:half], head[half:]) * turn[token]
                torch.testing.assert_close(output, torch.cat((turned.real, turned.imag)))
            torch.testing.assert_close(value[token, group], next(heads), rtol=0, atol=0)


@pytest.mark.parametrize("vocab", [1, 7, 33])
def test_statistics_and_gradient_are_those_of_log_softmax(vocab: int) -> None:
    n_rows = 6
    logits = (10 * random(n_rows, vocab, seed=7)).requires_grad_()
    targets = torch.arange(n_rows) % vocab
    maximum, total, weighted, target_logit = kernels.logit_statistics(logits.detach(), targets)
    log_p = torch.log_softmax(logits, dim=-1)
    logprob, entropy = log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)
    log_normalizer = maximum + total.log()
    torch.testing.assert_close(target_logit - log_normalizer, logprob.detach())
    torch.testing.assert_close(total.log() - weighted / total, entropy.detach(), rtol=1e-5, atol=1e-5)

    grad_logprob, grad_entropy = random(n_rows, seed=8), random(n_rows, seed=9)
    for with_entropy in (False, True):
        objective = (grad_logprob * logprob).sum() + (grad_entropy * entropy).sum() * with_entropy
        (expected,) = torch.autograd.grad(objective, logits, retain_graph=True)
        result = kernels.logit_gradient(
            logits.detach(),
            targets,
            log_normalizer,
            grad_logprob,
            grad_entropy if with_entropy else None,
            entropy.detach(),
            torch.float32,
        )
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("offset", [3000.0, -3000.0])
def test_an_offset_common_to_all_logits_costs_no_digits(offset: float) -> None:
    logits = random(6, 33, seed=7) + offset
    targets = torch.arange(6)
    maximum, total, weighted, target_logit = kernels.logit_statistics(logits, targets)
    log_p = torch.log_softmax(logits.double(), dim=-1)
    entropy = -(log_p.exp() * log_p).sum(-1).float()
    torch.testing.assert_close(total.log() - weighted / total, entropy, rtol=1e-6, atol=1e-6)
    logprob = log_p.gather(1, targets[:, None]).squeeze(1).float()
    torch.testing.assert_close((target_logit - maximum) - total.log(), logprob, rtol=1e-6, atol=1e-6)


def test_a_target_of_another_shard_has_logit_zero_and_no_gradient() -> None:
    logits = random(3, 5, seed=10)
    statistics = kernels.logit_statistics(logits, torch.tensor([-1, 5, 2]))
    assert statistics[3].tolist() == [0.0, 0.0, float(logits[2, 2])]
    grad = kernels.logit_gradient(
        logits, torch.tensor([-1, 5, 2]), logits.logsumexp(-1), torch.ones(3), None, torch.zeros(3), torch.float32
    )
    torch.testing.assert_close(grad.sum(-1), torch.tensor([-1.0, -1.0, 0.0]))
