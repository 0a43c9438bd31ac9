"""Objectives over pairs and answers against their papers' formulas, and the linear loss against the coupled one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import softplus

from fivefold.algorithms.loss import LossInputs
from fivefold.algorithms.preferences import BradleyTerry, DirectPreference, KahnemanTversky, Objective, derivatives
from fivefold.algorithms.supervised_losses import COEFFICIENT, LinearLoss
from fivefold.config.schema.preferences import DPOModelConfig

BETA = 0.3


def dpo(**values: Any) -> DirectPreference:
    return DirectPreference.of(DPOModelConfig(path="m", beta=BETA, **values))


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-x))


def dpo_loss(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    return -torch.log(sigmoid(BETA * (chosen - rejected)))


PAIRS: dict[str, tuple[Objective, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "sigmoid": (dpo(), dpo_loss),
    "conservative": (dpo(label_smoothing=0.2), lambda c, r: 0.8 * dpo_loss(c, r) + 0.2 * dpo_loss(r, c)),
    "hinge": (dpo(loss_type="hinge"), lambda c, r: torch.relu(1 - BETA * (c - r))),
    "ipo": (dpo(loss_type="ipo"), lambda c, r: (c - r - 1 / (2 * BETA)) ** 2),
    "reward": (BradleyTerry(0.0), lambda c, r: softplus(r - c)),
    "centred": (BradleyTerry(0.1), lambda c, r: softplus(r - c) + 0.1 * (c + r) ** 2),
}
"""Each objective, with its loss of one pair as the paper writes it."""


class Ragged:
    """Random sequences with parameters, from which a log-prob or value of each token is made."""

    def __init__(self, seed: int, n: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.lengths = tuple(torch.randint(2, 9, (n,), generator=generator).tolist())
        total = sum(self.lengths)
        self.features_TF = torch.randn(total, 5, generator=generator, dtype=torch.float64)
        self.theta_F = torch.randn(5, generator=generator, dtype=torch.float64, requires_grad=True)
        self.reference_T = torch.randn(total, generator=generator, dtype=torch.float64)
        masks = [torch.arange(length) >= 1 + length // 3 for length in self.lengths]
        self.mask_T = torch.cat(masks).double()

    def predictions_T(self) -> torch.Tensor:
        return torch.tanh(self.features_TF @ self.theta_F)

    def scores_N(self) -> torch.Tensor:
        values_T = (self.predictions_T() - self.reference_T) * self.mask_T
        return torch.stack([part.sum() for part in values_T.split(list(self.lengths))])

    def trained_N(self) -> torch.Tensor:
        return torch.stack([part.sum() for part in self.mask_T.split(list(self.lengths))])

    def gradient(self, objective: Objective, order: list[int], micro_batch: int) -> torch.Tensor:
        """Return the gradient of the linear loss, summed over micro-batches of the sequences in `order`."""
        coefficients_N, _ = derivatives(
            objective, self.scores_N().detach().numpy(), self.trained_N().numpy().astype(np.int64)
        )
        starts = np.cumsum((0, *self.lengths))
        for begin in range(0, len(order), micro_batch):
            own = order[begin : begin + micro_batch]
            rows = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in own])
            lengths = tuple(self.lengths[i] for i in own)
            fields = {COEFFICIENT: torch.from_numpy(np.repeat(coefficients_N[own], lengths))}
            loss, _ = LinearLoss("values")(
                LossInputs({"values": self.predictions_T()[rows]}, self.mask_T[rows], lengths, fields)
            )
            loss.backward()  # type: ignore[no-untyped-call]
        gradient = self.theta_F.grad
        assert gradient is not None
        self.theta_F.grad = None
        return gradient


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("seed", range(3))
def test_the_linear_loss_has_the_gradient_of_the_coupled_one(name: str, seed: int) -> None:
    objective, formula = PAIRS[name]
    data = Ragged(seed, n=12)
    scores_N = data.scores_N()
    want = torch.stack([formula(scores_N[i], scores_N[i + 1]) for i in range(0, 12, 2)]).mean()
    (gradient,) = torch.autograd.grad(want, data.theta_F)
    _, metrics = derivatives(objective, scores_N.detach().numpy(), data.trained_N().numpy().astype(np.int64))
    assert metrics["loss"] == pytest.approx(want.item(), rel=1e-9)
    generator = torch.Generator().manual_seed(seed)
    for micro_batch in (1, 5, 12):
        order = torch.randperm(12, generator=generator).tolist()
        torch.testing.assert_close(data.gradient(objective, order, micro_batch), gradient, rtol=1e-5, atol=1e-7)


def test_averaged_log_probs_weigh_long_and_short_answers_alike() -> None:
    data = Ragged(0, n=8)
    ratios_N = data.scores_N() / data.trained_N()
    want = torch.stack([(ratios_N[i] - ratios_N[i + 1] - 1 / (2 * BETA)) ** 2 for i in range(0, 8, 2)]).mean()
    (gradient,) = torch.autograd.grad(want, data.theta_F)
    objective = dpo(loss_type="ipo", average_log_prob=True)
    torch.testing.assert_close(data.gradient(objective, list(range(8)), 3), gradient, rtol=1e-5, atol=1e-7)


def log_sigmoid(x: torch.Tensor) -> torch.Tensor:
    return torch.log(sigmoid(x))


def odds(logprob: torch.Tensor) -> torch.Tensor:
    return torch.exp(logprob) / (1 - torch.exp(logprob))


WITHOUT_REFERENCE: dict[str, tuple[dict[str, Any], float, Callable[..., torch.Tensor]]] = {
    "cpo": ({}, 1.0, lambda c, r, a, b: -log_sigmoid(BETA * (c - r))),
    "simpo": ({"simpo_gamma": 0.7}, 0.0, lambda c, r, a, b: -log_sigmoid(BETA * a - BETA * b - 0.7)),
    "orpo": ({}, 1.0, lambda c, r, a, b: -BETA * log_sigmoid(torch.log(odds(a) / odds(b)))),
    "sigmoid": ({"nll_weight": 0.25}, 0.25, lambda c, r, a, b: dpo_loss(c, r)),
}
"""Keys of each loss, its weight of the chosen answers' likelihood unless it is written, and its loss of one pair from
the log-probs of both answers and their means over the answers' tokens."""


@pytest.mark.parametrize("name", WITHOUT_REFERENCE)
@pytest.mark.parametrize("written", [None, 0.0, 0.4])
def test_losses_without_a_reference_are_those_of_their_papers(name: str, written: float | None) -> None:
    keys, weight, formula = WITHOUT_REFERENCE[name]
    if written is not None:
        keys, weight = keys | {"nll_weight": written}, written
    generator = torch.Generator().manual_seed(3)
    lengths_N = torch.randint(1, 9, (8,), generator=generator).double()
    logprobs_N = (-lengths_N * torch.rand(8, generator=generator).double()).requires_grad_()
    averages_N = logprobs_N / lengths_N
    losses = [formula(*logprobs_N[i : i + 2], *averages_N[i : i + 2]) for i in range(0, 8, 2)]
    nll = -logprobs_N[::2].sum() / lengths_N[::2].sum()
    want = torch.stack(losses).mean() + weight * nll
    (gradient_N,) = torch.autograd.grad(want, logprobs_N)
    found_N, metrics = derivatives(
        dpo(loss_type=name, **keys), logprobs_N.detach().numpy(), lengths_N.numpy().astype(np.int64)
    )
    assert metrics["loss"] == pytest.approx(want.item(), rel=1e-9)
    np.testing.assert_allclose(found_N, gradient_N.numpy(), rtol=1e-5)
    assert metrics.get("nll/chosen") == (pytest.approx(nll.item()) if weight else None)


def test_answers_that_are_certain_have_a_finite_loss() -> None:
    found_N, metrics = derivatives(dpo(loss_type="orpo"), np.array([0.0, 0.0]), np.array([2, 3]))
    assert np.isfinite(found_N).all()
    assert math.isfinite(metrics["loss"])


def test_likelihood_is_the_models_alone_and_ratios_are_to_the_reference() -> None:
    scores, reference, lengths = np.array([-3.0, -5.0]), np.array([-2.0, -7.0]), np.array([2, 4])
    _, metrics = derivatives(dpo(nll_weight=2.0), scores, lengths, reference)
    ratio = torch.tensor(scores - reference)
    assert metrics["nll/chosen"] == 1.5
    assert metrics["loss"] == pytest.approx(dpo_loss(ratio[0], ratio[1]).item() + 2.0 * 1.5)


@pytest.mark.parametrize(
    ("aggregation", "nll"),
    [("token_mean", (3 + 8) / (2 + 8)), ("sequence_mean", (3 / 2 + 8 / 8) / 2), ("sequence_sum", (3 + 8) / 2)],
)
def test_the_likelihood_of_chosen_answers_is_a_mean_over_tokens_or_answers(aggregation: str, nll: float) -> None:
    scores, lengths = np.array([-3.0, -5.0, -8.0, -1.0]), np.array([2, 4, 8, 3])
    weighed = dpo(loss_type="cpo", nll_weight=0.5, nll_aggregation=aggregation)
    found_N, metrics = derivatives(weighed, scores, lengths)
    plain_N, plain = derivatives(dpo(loss_type="cpo", nll_weight=0.0), scores, lengths)
    assert metrics["nll/chosen"] == pytest.approx(nll)
    assert metrics["loss"] - plain["loss"] == pytest.approx(0.5 * nll)
    of_first = {"token_mean": 1 / 10, "sequence_mean": 1 / 4, "sequence_sum": 1 / 2}[aggregation]
    assert found_N[0] - plain_N[0] == pytest.approx(-0.5 * of_first)


def test_kto_compares_answers_with_mismatched_ones_that_are_not_trained() -> None:
    config = DPOModelConfig(path="m", beta=BETA, loss_type="kto", desirable_weight=1.5, undesirable_weight=0.5)
    desirable, scores = (True, False, False), [0.7, -0.4, 2.0, 1.0, 3.0, -1.0]
    point = 1.0  # the mean of the last three
    values = [1 - 1 / (1 + math.exp(-BETA * (score - point) * (1 if good else -1)))
              for good, score in zip(desirable, scores, strict=False)]  # fmt: skip
    want = sum(weight * value for weight, value in zip((1.5, 0.5, 0.5), values, strict=True)) / 3
    objective = KahnemanTversky(config, desirable)
    derivatives_N, metrics = derivatives(objective, np.array(scores), np.ones(6, np.int64))
    assert metrics["loss"] == pytest.approx(want)
    assert metrics["kl"] == point
    assert metrics["accuracy"] == pytest.approx(1 / 3), "only the first undesirable answer is below the point"
    slopes = [value * (1 - value) for value in values]
    expected = [-1.5 * BETA * slopes[0] / 3, 0.5 * BETA * slopes[1] / 3, 0.5 * BETA * slopes[2] / 3, 0, 0, 0]
    np.testing.assert_allclose(derivatives_N, expected, rtol=1e-6)
    _, below = derivatives(objective, np.array([*scores[:3], -1.0, -2.0, -3.0]), np.ones(6, np.int64))
    assert below["kl"] == 0
    _, one_kind = derivatives(KahnemanTversky(config, (True,)), np.array([1.0, 0.0]), np.ones(2, np.int64))
    assert "reward/undesirable" not in one_kind


def test_the_metrics_of_pairs() -> None:
    scores = np.array([2.0, 1.0, 0.0, 0.0, -3.0, 1.0, 4.0, 0.0])
    _, metrics = derivatives(dpo(), scores, np.ones(8, np.int64))
    assert metrics["accuracy"] == pytest.approx((1 + 0.5 + 0 + 1) / 4), "a tie counts half"
    assert metrics["margin"] == pytest.approx(BETA * (1 + 0 - 4 + 4) / 4)
    assert metrics["reward/chosen"] == pytest.approx(BETA * 3 / 4)
    assert metrics["reward/rejected"] == pytest.approx(BETA * 2 / 4)


def test_untrained_tokens_may_have_any_value() -> None:
    inputs = LossInputs(
        {"logprobs": torch.tensor([float("nan"), -1.0, -2.0]), "entropy": torch.tensor([float("nan"), 0.5, 0.25])},
        torch.tensor([0.0, 1.0, 1.0]),
        (3,),
        {COEFFICIENT: torch.tensor([float("nan"), 2.0, 2.0])},
    )
    loss, metrics = LinearLoss("logprobs")(inputs)
    assert loss.item() == -6.0
    assert float(metrics["entropy"].sum) == 0.75
