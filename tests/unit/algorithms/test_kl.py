"""The estimators against an exact KL divergence."""

from __future__ import annotations

import pytest
import torch

from fivefold.algorithms.kl import KLEstimator, kl_estimate


def two_distributions() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, generator=generator, dtype=torch.float64)
    other = logits + 0.2 * torch.randn(6, generator=generator, dtype=torch.float64)
    return logits.log_softmax(0), other.log_softmax(0)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased_estimators_average_to_the_divergence(estimator: KLEstimator) -> None:
    policy, reference = two_distributions()
    exact = torch.nn.functional.kl_div(reference, policy, log_target=True, reduction="sum")
    assert (policy.exp() * kl_estimate(policy, reference, estimator)).sum().item() == pytest.approx(
        exact.item(), rel=1e-12
    )


def test_k2_has_the_gradient_of_the_divergence() -> None:
    logits = torch.randn(6, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    _, reference = two_distributions()
    policy = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    weights = policy.exp().detach()
    (k2,) = torch.autograd.grad((weights * kl_estimate(policy, reference, "k2")).sum(), logits, retain_graph=True)
    (k1,) = torch.autograd.grad((weights * kl_estimate(policy, reference, "k1")).sum(), logits)
    torch.testing.assert_close(k2, exact)
    torch.testing.assert_close(k1, torch.zeros_like(k1), rtol=0, atol=1e-15)


def test_k3_is_never_negative_and_accurate_for_close_policies_in_float32() -> None:
    policy = torch.linspace(-5, 0, 101)
    close = policy + 1e-4
    value = kl_estimate(policy, close, "k3")
    exact = kl_estimate(policy.double(), close.double(), "k3")
    assert (value >= 0).all()
    torch.testing.assert_close(value.double(), exact, rtol=0.05, atol=0)
    assert kl_estimate(torch.tensor([-1e4]), torch.tensor([0.0]), "k3").isfinite().all()
